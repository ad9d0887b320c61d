"""Time to the first token of a chat with an image, beside `transformers`, and what a burst of images costs streams.

    python -m bench.serving.media_ttft [--rounds 5] [--burst 6] [--threads 2] [--device cuda]

The model is random, in bf16: the vision tower of Gemma 4 E2B and a text model of about 100 million parameters. Each
image is new and has 280 soft tokens. There are two stacks, without and with an encode worker, and the model of
`transformers` in this process; they take turns. A time begins with the bytes of a PNG file and ends with the first
token; that of a stack includes HTTP, and that of `transformers` neither the chat template nor the tokenizer.

Then, for each stack, four streams of text run alone and beside a burst of images. The same text without an image shows
how much of a time is not due to the image.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from bench.common.media_model import DTYPE, VISION, VOCAB, write_media_model
from bench.common.services import serving
from bench.common.workloads import FIRST_ID, Request, Workload
from bench.serving.load import Outcome, Server, new_file, summarize, table
from tests.services.gateway.planning.media.samples import data_url, image_file

SIZE = (1000, 700)
"""Width and height of images in pixels, which are resized to 20 x 14 squares: 280 soft tokens."""
STREAMS, STREAM_TOKENS = 4, 64
BURST_SECONDS = 0.2
"""Seconds between two images of a burst."""
QUIET_ROUNDS = 4
"""Number of times that the streams run alone."""
WAYS = {"encoders on the prefill worker": 0, "--encode 1": 1}


def picture(seed: int) -> bytes:
    """Return a PNG file that no other seed has, which is about as hard to unpack as a photograph."""
    small = np.random.default_rng(seed).integers(0, 256, (SIZE[1] // 8, SIZE[0] // 8, 3), dtype=np.uint8)
    return image_file("PNG", Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC))


def chat(file: bytes | None) -> dict[str, Any]:
    """Return the fields of a chat, with an image or without."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is in this picture?"}]
    if file is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": data_url(file)}})
    return {"messages": [{"role": "user", "content": parts}]}


async def first_token(url: str, file: bytes | None) -> tuple[float, list[int]]:
    """Return the seconds of a request for one token, and the ids of its prompt."""
    body = {**chat(file), "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        await client.get("/health")  # makes the connection
        begun = time.perf_counter()
        answer = await client.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - begun
    return seconds, answer.raise_for_status().json()["prompt_token_ids"]


def first_token_of_transformers(model: Any, file: bytes, prompt: list[int]) -> float:
    """Return the seconds that `transformers` takes for the same image and prompt."""
    begun = time.perf_counter()
    made = Gemma4ImageProcessorPil()(Image.open(io.BytesIO(file)).convert("RGB"), return_tensors="pt")
    ids = torch.tensor([prompt], device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=made["pixel_values"].to(model.device, DTYPE),
        image_position_ids=made["image_position_ids"].to(model.device),
        mm_token_type_ids=(ids == model.config.image_token_id).long(),
        max_new_tokens=1,
        do_sample=False,
    )
    return time.perf_counter() - begun


async def burst(url: str, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the figures of streams alone and beside a burst of images, and of the images."""
    rng, figures = random.Random(seed), {}
    async with Server(url) as server:

        async def streams(is_over: Callable[[], bool]) -> list[Outcome]:
            outcomes: list[Outcome] = []
            while not is_over():
                prompts = [tuple(rng.choices(range(FIRST_ID, VOCAB), k=64)) for _ in range(STREAMS)]
                requests = tuple(Request(prompt, STREAM_TOKENS) for prompt in prompts)
                outcomes += await server.run(Workload("streams", requests, STREAMS))
            return outcomes

        left = iter([False] * QUIET_ROUNDS)
        figures["alone"] = summarize(await streams(lambda: next(left, True)))["all"]
        files = [chat(picture(seed + number)) for number in range(count)]
        images = Workload(
            "images",
            tuple(Request((), 2, at=BURST_SECONDS * i, chat=file_bytes) for i, file_bytes in enumerate(files)),
            count,
        )
        arriving = asyncio.create_task(server.run(images))
        figures["burst"] = summarize(await streams(arriving.done))["all"]
        figures["images"] = summarize(await arriving)["all"]
    return figures


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return seconds to first tokens of all ways, and the figures of `burst` of all stacks."""
    torch.set_num_threads(options.threads)
    reference = write_media_model(folder / "model", {**VISION, "num_hidden_layers": options.layers}).to(options.device)
    seconds: dict[str, list[float]] = {way: [] for way in (*WAYS, "transformers", "no image")}
    with contextlib.ExitStack() as stack:
        urls = {}
        for way, workers in WAYS.items():
            places = (f"--threads={options.threads}", f"--device={options.device}")
            flags = (f"--encode={workers}", *places, "--kv-memory=512MiB")
            _, urls[way] = stack.enter_context(serving(folder / f"log-{workers}", str(folder / "model"), *flags))
        for number in range(options.rounds + 1):
            now = {}
            for index, (way, url) in enumerate(urls.items()):
                # A stack would know an image that it has seen.
                now[way], prompt = asyncio.run(first_token(url, picture(options.seed + 10 * number + index)))
            now["transformers"] = first_token_of_transformers(reference, picture(options.seed + 10 * number), prompt)
            now["no image"], _ = asyncio.run(first_token(next(iter(urls.values())), None))
            if number > 0:  # the first round warms everything up
                for way, way_seconds in now.items():
                    seconds[way].append(way_seconds)
        bursts = {way: asyncio.run(burst(url, options.burst, options.seed + 10_000)) for way, url in urls.items()}
    return {"first_token_s": seconds, "bursts": bursts, "soft_tokens": prompt.count(reference.config.image_token_id)}


def report(figures: dict[str, Any]) -> None:
    """Print all figures as tables."""
    seconds = figures["first_token_s"]
    peer = statistics.median(seconds["transformers"])
    rows = [
        [
            way,
            f"{statistics.median(way_seconds):.3f}",
            f"{min(way_seconds):.3f}",
            f"{max(way_seconds):.3f}",
            f"{peer / statistics.median(way_seconds):.2f}",
        ]
        for way, way_seconds in seconds.items()
    ]
    print(f"{figures['soft_tokens']} soft tokens")
    print(table(["first token", "median s", "least", "most", "times as fast as transformers"], rows))
    lines = []
    for way, way_figures in figures["bursts"].items():
        alone, beside, images = way_figures["alone"], way_figures["burst"], way_figures["images"]
        for name, row in (("alone", alone), ("beside images", beside)):
            times = [f"{row[each]:.1f}" for each in ("itl_ms_p50", "itl_ms_p99")]
            lines.append([way, f"streams {name}", *times, f"{row['itl_ms_p99'] / alone['itl_ms_p99']:.2f}", "", ""])
        ttft = [f"{images[each] / 1000:.2f}" for each in ("ttft_ms_p50", "ttft_ms_p99")]
        lines.append([way, f"{images['requests']:.0f} images", "", "", "", *ttft])
    header = ["stack", "load", "ITL p50 ms", "p99 ms", "p99 / alone", "TTFT p50 s", "p99 s"]
    print(table(header, lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.media_ttft", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=int, default=6, help="images in a burst [%(default)s]")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of a worker, and of transformers")
    parser.add_argument("--device", default="cpu", help="of all workers and of transformers [%(default)s]")
    parser.add_argument("--layers", type=int, default=16, help="layers of the vision tower [%(default)s]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    report(figures)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return (
        1 if any(row["failures"] for way_figures in figures["bursts"].values() for row in way_figures.values()) else 0
    )


if __name__ == "__main__":
    sys.exit(main())
