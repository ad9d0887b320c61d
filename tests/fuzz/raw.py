"""Bytes that are not a valid call: noise, invalid HTTP/2, invalid HTTP/1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WAIT_SECONDS = 0.3

_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/fleet",
    "/health",
    "/metrics",
    "/",
    "/v1/../fleet",
    "/%00",
    "/v1/completions?" + "q" * 5000,
)
_VALUES: tuple[object, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    2**70,
    1e308,
    "",
    "x",
    "\ud800",
    "z" * 5000,
    [],
    [1],
    [-1],
    [2**32],
    [[1, 2], [3]],
    ["a", "b"],
    {},
    {"a": {}},
    {"1": 1e9},
    [{"role": "user", "content": "hi"}],
    [{"role": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}, {"type": "input_audio", "uuid": "a"}]}],
    {"type": "json_object"},
    {"regex": "(a|b)*{1000}{1000}"},
    {"grammar": "start: start"},
    {"json": {"$ref": "#"}},
)
_FIELDS = """
    prompt messages model max_tokens min_tokens temperature top_p top_k min_p repetition_penalty presence_penalty
    frequency_penalty seed n best_of stop stop_token_ids logit_bias allowed_token_ids logprobs prompt_logprobs echo
    response_format structured_outputs guided_regex stream stream_options cache_salt truncate_prompt_tokens tokens
    ignore_eos priority mm_processor_kwargs
"""


async def send(address: tuple[str, int] | str, data: bytes, rng: random.Random) -> None:
    """Send bytes to a port or a socket, perhaps in pieces. Then close at once, after an answer, or with a reset."""
    with contextlib.suppress(OSError, TimeoutError):
        if isinstance(address, str):
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            reader, writer = await asyncio.open_connection(*address)
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 5))))
                for start, end in zip([0, *cuts], [*cuts, len(data)]):
                    writer.write(data[start:end])
                    await writer.drain()
                if rng.random() < 0.7:
                    while await reader.read(65536):
                        pass
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()
            writer.close()


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 9, 24, 1000, 100_000)))


def http2(rng: random.Random) -> bytes:
    """Return the bytes of a connection that begins as valid HTTP/2 and becomes invalid."""
    data = PREFACE if rng.random() < 0.9 else PREFACE[: rng.randrange(24)]
    if rng.random() < 0.8:
        data += _frame(4, 0, 0, b"")
    for _ in range(rng.choice((1, 2, 10, 200))):
        kind, flags = rng.choice((*range(11), 255)), rng.choice((0, 1, 4, 5, 8, 0x20, 0xFF))
        stream = rng.choice((0, 1, 3, 2, 2**31 - 1, rng.getrandbits(31)))
        body = rng.randbytes(rng.choice((0, 1, 4, 5, 6, 8, 100, 3000)))
        frame = _frame(kind, flags, stream, body)
        data += frame if rng.random() < 0.9 else struct.pack(">I", rng.getrandbits(32))[:3] + frame[3:]
    return data


def http1(rng: random.Random) -> bytes:
    """Return a request to the HTTP API with an error in its head or its body."""
    body = _body(rng)
    method = rng.choice(("POST", "POST", "POST", "GET", "PUT", "OPTIONS", "BREW", "PRI"))
    head = f"{method} {rng.choice(_PATHS)} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    match rng.randrange(9):
        case 0:
            head += b"Transfer-Encoding: chunked\r\n\r\n" + rng.choice((b"ffffffffffffffff\r\n", b"-1\r\n", b"5\r\nab"))
        case 1:
            head += b"Content-Length: " + rng.choice((b"-1", b"99999999999999999999", b"1e3", b"8388609")) + b"\r\n\r\n"
        case 2:
            head += b"Content-Length: 5\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
        case 3:
            head += b"X-A: " + b"a" * rng.choice((10, 60_000, 300_000)) + b"\r\n\r\n"
        case 4:
            head += b"".join(b"X-%d: y\r\n" % i for i in range(3000)) + b"\r\n"
        case 5:
            head += b"X-Request-Id: \xff\x00\r\nTraceparent: 00-zz\r\nAuthorization: Bearer \xff\r\n\r\n"
        case 6:
            head += b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n"
        case _:
            return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return head + body


def _body(rng: random.Random) -> bytes:
    if rng.random() < 0.15:
        deep, odd = (b"[" * 100_000, b'{"a":' * 20_000), (b"\xff\xfe", b'{"prompt": "\\ud800"}', b"nul", b"1" * 5000)
        return rng.choice((*deep, *odd))
    fields = {"prompt": "abc", "max_tokens": 2, **{rng.choice(_FIELDS.split()): rng.choice(_VALUES) for _ in range(3)}}
    data = json.dumps(fields).encode()
    return data if rng.random() < 0.9 else data[: rng.randrange(len(data))]


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body
