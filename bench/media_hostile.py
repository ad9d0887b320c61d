"""Send hostile images, videos and audio to a server, and measure what they cost the gateway and other requests.

    python -m bench.media_hostile --url http://127.0.0.1:8000 --pid GATEWAY --count 10000

The model must read images; items of kinds that it does not read are refused, too. Streams of text run beside, first
alone and then during the attack. The table shows their ITL, and the memory of the gateway and of its processes that
decode. A request that is answered with 5xx, or not at all, counts as a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import random
import struct
import sys
import time
import wave
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import av
import httpx
import numpy as np
import psutil
from PIL import Image

from bench.load import Server, new_file, summarize, table
from bench.systems import ServerError
from bench.workloads import FIRST_ID, Request, Workload

STREAMS, STREAM_TOKENS = 4, 200
REQUEST_SECONDS = 120.0
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PRIVATE_URLS = (
    "http://127.0.0.1:6379/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:10.0.0.1]/",
    "http://2130706433/",
    "http://0x7f.1/",
    "http://user@example.com/",
    "http://[64:ff9b::7f00:1]/",
    "file:///etc/passwd",
    "file:///dev/zero",
    "gopher://127.0.0.1/",
    "http://nowhere.invalid/cat.png",
)

Part = dict[str, Any]
"""A part of a message's content."""


class Attacks:
    """Makes hostile parts of messages, of all kinds and from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._images = [_image(format) for format in IMAGE_FORMATS]
        self._video, self._clip = _video(), _clip(16_000)
        self._bomb = _png(8000, 8000, bytes(8000 * 24_001))

    def next(self) -> tuple[str, Part]:
        """Return the name of a kind of attack, and a part."""
        kinds: dict[str, Callable[[], Part]] = {
            "changed image": lambda: _part("image_url", self._changed(self._rng.choice(self._images))),
            "changed video": lambda: _part("video_url", self._changed(self._video)),
            "changed audio": lambda: _part("audio_url", self._changed(self._clip)),
            "half an image": lambda: _part("image_url", self._cut(self._rng.choice(self._images))),
            "half a video": lambda: _part("video_url", self._cut(self._video)),
            "noise": lambda: _part("image_url", self._rng.randbytes(self._rng.randint(0, 5000))),
            "SVG": lambda: _part("image_url", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
            "image of 3.6 gigapixels": lambda: _part("image_url", _png(60_000, 60_000, b"")),
            "image bomb": lambda: _part("image_url", self._bomb),
            "clip of years": lambda: _part("audio_url", _clip(1)),
            "no base64": lambda: {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
            "private URL": lambda: {"type": "image_url", "image_url": {"url": self._rng.choice(PRIVATE_URLS)}},
        }
        # A bomb keeps a process busy for a second, so it is rare.
        weights = [1 if "bomb" in name else 20 for name in kinds]
        (name,) = self._rng.choices(list(kinds), weights)
        return name, kinds[name]()

    def _changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._rng.randint(1, 10)):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        return data[: self._rng.randrange(len(data))]


def _part(type: str, data: bytes) -> Part:
    return {"type": type, type: {"url": "data:;base64," + base64.b64encode(data).decode()}}


def _image(format: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, format)
    return file.getvalue()


def _png(width: int, height: int, rows: bytes) -> bytes:
    """Return a PNG whose head need not fit its rows."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def _video() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in range(0, 250, 10):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade, np.uint8))))
        container.mux(stream.encode())
    return file.getvalue()


def _clip(rate: int) -> bytes:
    """Return 8,000 samples, which take years if the rate is low."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(at / 9))) for at in range(8000)))
    return file.getvalue()


def beside(seed: int, vocab: int) -> Workload:
    """Return streams of text."""
    rng = random.Random(seed)
    prompts = [tuple(rng.choices(range(FIRST_ID, vocab), k=64)) for _ in range(STREAMS)]
    return Workload("beside", tuple(Request(prompt, STREAM_TOKENS) for prompt in prompts), STREAMS)


def memory(pid: int) -> tuple[float, float]:
    """Return the resident memory of the gateway, and of all its child processes, in MiB."""
    gateway = psutil.Process(pid)
    children = gateway.children(recursive=True)
    return gateway.memory_info().rss / 2**20, sum(child.memory_info().rss for child in children) / 2**20


async def attack(
    url: str, model: str, api_key: str, count: int, concurrency: int, seed: int
) -> Counter[tuple[str, str]]:
    """Send `count` hostile requests, and count them by kind and status."""
    attacks, answers = Attacks(seed), Counter[tuple[str, str]]()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    remaining = iter(range(count))
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=REQUEST_SECONDS, trust_env=False) as client:

        async def send() -> None:
            for _ in remaining:
                kind, part = attacks.next()
                content = [part, {"type": "text", "text": "What is this?"}]
                body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
                try:
                    status = str((await client.post("/v1/chat/completions", json=body)).status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                answers[kind, status] += 1

        await asyncio.gather(*(send() for _ in range(concurrency)))
    return answers


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of the streams beside, of the answers, and of memory in MiB."""
    figures: dict[str, Any] = {"seed": options.seed, "memory": {}, "itl_ms": {}}
    async with Server(options.url, options.model, options.api_key) as server:

        async def streams(name: str, until: Callable[[], bool]) -> None:
            outcomes = []
            while not outcomes or not until():
                outcomes += await server.run(beside(options.seed + len(outcomes), options.vocab))
            figures["itl_ms"][name] = summarize(outcomes)["all"]
            figures["memory"][name] = memory(options.pid) if options.pid else (math.nan, math.nan)

        await streams("before", lambda: True)
        # The first items start the processes that decode.
        await attack(options.url, server.model, options.api_key, 50, options.concurrency, options.seed + 1)
        await streams("first items", lambda: True)
        begun = time.perf_counter()
        attacking = asyncio.create_task(
            attack(options.url, server.model, options.api_key, options.count, options.concurrency, options.seed)
        )
        await streams("attack", attacking.done)
        answers = await attacking
        figures["attack_seconds"] = time.perf_counter() - begun
        await streams("after", lambda: True)
    figures["answers"] = [[*key, number] for key, number in sorted(answers.items())]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.media_hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to attack")
    parser.add_argument("--model", default="", help="model name; default: the first one that the server lists")
    parser.add_argument("--api-key", default="", help="API key for the server")
    parser.add_argument("--pid", type=int, default=0, help="process of the gateway, if it is on this machine")
    parser.add_argument("--count", type=int, default=10_000, help="hostile requests")
    parser.add_argument("--concurrency", type=int, default=8, help="hostile requests at a time")
    parser.add_argument("--vocab", type=int, default=32_000, help="prompts of the streams have token ids below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    try:
        figures = asyncio.run(measure(options))
    except ServerError as error:
        print(f"bench.media_hostile: {error}", file=sys.stderr)
        return 1
    print(table(["attack", "status", "requests"], [[kind, status, str(n)] for kind, status, n in figures["answers"]]))
    rows = [
        [
            name,
            f"{row['itl_ms_p50']:.1f}",
            f"{row['itl_ms_p99']:.1f}",
            f"{row['failures']:.0f}",
            *(f"{m:.0f}" for m in mib),
        ]
        for (name, row), mib in zip(figures["itl_ms"].items(), figures["memory"].values())
    ]
    print(table(["streams", "ITL p50 ms", "ITL p99 ms", "failures", "gateway MiB", "decoders MiB"], rows))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    failed = sum(number for _, status, number in figures["answers"] if not status.startswith(("2", "4")))
    return 1 if failed or any(row["failures"] for row in figures["itl_ms"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
