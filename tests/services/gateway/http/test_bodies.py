"""Compressed bodies of requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from paceline.services.gateway.http import bodies
from paceline.services.gateway.http.bodies import CODINGS, DecodedBody, Inflater
from tests.services.gateway.conftest import StartStack

ASKED = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


WRITERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("GZIP", gzip.compress),
    ("x-gzip", gzip.compress),
    ("gzip", lambda data: gzip.compress(data[:5], mtime=0) + gzip.compress(data[5:], mtime=0)),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("identity", bytes),
]


def read(coding: str, parts: Iterable[bytes], most: int = 1 << 20) -> bytes:
    """Return a body that arrives in parts. Raises HTTPException."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def read_all() -> bytes:
        body, content = DecodedBody(receive, coding, most, "too large"), bytearray()
        while (event := await body.receive())["type"] == "http.request":
            assert len(event["body"]) <= bodies.PIECE_BYTES
            content += event["body"]
        return bytes(content)

    return asyncio.run(read_all())


@given(
    st.binary(max_size=3000),
    st.integers(1, 300),
    st.sampled_from([pair for pair in WRITERS if pair[0] in CODINGS]),
)
def test_what_was_compressed_is_read(data: bytes, size: int, writer: tuple[str, Callable[[bytes], bytes]]) -> None:
    coding, compress = writer
    sent = compress(data)
    assert read(coding, [sent[at : at + size] for at in range(0, len(sent), size)]) == data


def test_a_bomb_is_refused_after_the_bytes_of_the_limit() -> None:
    bomb = gzip.compress(bytes(20 << 20), mtime=0)
    made = 0

    class Counting(Inflater):
        def pieces(self, data: bytes) -> Any:
            nonlocal made
            for piece in super().pieces(data):
                made += len(piece)
                yield piece

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "Inflater", Counting)
        with pytest.raises(HTTPException) as caught:
            read("gzip", [bomb], most=1 << 20)
    assert caught.value.status_code == 413
    assert made <= (1 << 20) + bodies.PIECE_BYTES


def test_the_limit_itself_is_allowed() -> None:
    assert len(read("gzip", [gzip.compress(bytes(1 << 20), mtime=0)], most=1 << 20)) == 1 << 20


def test_a_million_empty_members_are_refused() -> None:
    with pytest.raises(HTTPException) as caught:
        read("gzip", [gzip.compress(b"", mtime=0)] * 2000, most=1 << 20)
    assert caught.value.status_code == 413


@pytest.mark.parametrize(
    ("coding", "sent"),
    [
        ("gzip", gzip.compress(ASKED, mtime=0)[:-1]),
        ("gzip", gzip.compress(ASKED, mtime=0)[:-8] + bytes(8)),
        ("gzip", gzip.compress(ASKED, mtime=0) + b"more"),
        ("gzip", ASKED),
        ("gzip", zlib.compress(ASKED)),
        ("deflate", zlib.compress(ASKED) + b"more"),
        ("deflate", zlib.compress(ASKED)[:-5]),
        ("deflate", gzip.compress(ASKED, mtime=0)),
    ],
)
def test_a_damaged_body_is_refused(coding: str, sent: bytes) -> None:
    with pytest.raises(HTTPException, match=f"not valid {coding}") as caught:
        read(coding, [sent])
    assert caught.value.status_code == 400


@pytest.mark.slow
async def test_the_api_takes_compressed_bodies(start_stack: StartStack) -> None:
    stack = await start_stack(max_body_bytes=10_000, local_prefill_tokens=100)

    async def post(path: str, coding: str, content: bytes, **headers: str) -> tuple[int, str, str]:
        headers = {"content-type": "application/json", "content-encoding": coding} | headers
        answer = await stack.http.post(path, content=content, headers=headers)
        told = "" if answer.is_success else answer.json()["error"]["message"]
        return answer.status_code, told, answer.headers.get("accept-encoding", "")

    for coding, compress in WRITERS:
        assert await post("/v1/completions", coding, compress(ASKED)) == (200, "", "")
    for coding in ("br", "zstd", "compress", "gzip, gzip", "x" * 2000):
        status, told, accepted = await post("/v1/completions", coding, b"whatever")
        assert (status, accepted) == (415, "gzip, deflate")
        assert "send it as gzip, deflate, or uncompressed" in told
    bomb = gzip.compress(b'{"prompt": "' + b"x" * 5_000_000 + b'"}', mtime=0)
    assert len(bomb) < 10_000
    status, told, _ = await post("/v1/completions", "gzip", bomb)
    assert (status, told.partition(":")[0]) == (
        413,
        "decompressed, the body is larger than 10000 bytes, the --max-body-bytes of the gateway",
    )
    assert (await post("/v1/completions", "gzip", b""))[0] == 400  # an empty body is not damaged
    assert (await stack.http.get("/ping", headers={"content-encoding": "br"})).status_code == 200
