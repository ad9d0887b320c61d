"""A batch beside kills, and beside requests of clients.

    python -m bench.serving.batches [--lines 1000] [--model smollm2-135m-instruct]

First all processes that serve, the gateway and each worker, are killed with SIGKILL while a batch runs. Then each line
must have one answer, equal to the answer of a stack that nobody disturbs. Second, the time between two tokens (ITL) of
streams is measured without a batch and beside one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.stack.processes import Stack, serve

PATIENCE = 3600.0
STREAMS = 2
TOKENS = 192
ENDED = ("completed", "failed", "expired", "cancelled")

Json = dict[str, Any]


def make_lines(count: int, model: str, tokens: int = 16) -> list[Json]:
    """Return requests with seeds, so that their answers are known."""
    bodies: list[Json] = [
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Write the number {number} in words, then a rhyme."}],
            "seed": number,
            "temperature": 0.8,
            "max_tokens": tokens,
        }
        for number in range(count)
    ]
    return [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]


async def patiently(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """Return an answer of a gateway, and retry while the gateway is starting again."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                answer = await ask()
                if answer.status_code < 500:
                    return answer
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def submit(http: httpx.AsyncClient, lines: Sequence[Json]) -> str:
    """Start a batch and return its id."""
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
    file.raise_for_status()
    body = {"input_file_id": file.json()["id"], "endpoint": lines[0]["url"], "completion_window": "24h"}
    batch = await http.post("/v1/batches", json=body)
    batch.raise_for_status()
    return str(batch.json()["id"])


async def status(http: httpx.AsyncClient, batch_id: str) -> Json:
    """Return a batch as it is now."""
    return dict((await patiently(lambda: http.get(f"/v1/batches/{batch_id}"))).json())


async def wait_for(http: httpx.AsyncClient, batch_id: str, done: int | None = None) -> Json:
    """Wait until a batch has ended, or has `done` answers, and return it."""
    while True:
        batch = await status(http, batch_id)
        counts = batch["request_counts"]
        if batch["status"] in ENDED or (done is not None and counts["completed"] + counts["failed"] >= done):
            return batch
        await asyncio.sleep(0.1)


async def answers(http: httpx.AsyncClient, batch: Json) -> list[tuple[str, str]]:
    """Return the id and the text of each answer of a batch, in order."""
    content = await patiently(lambda: http.get(f"/v1/files/{batch['output_file_id']}/content"))
    lines = [json.loads(line) for line in content.text.splitlines()]
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"]) for line in lines]


async def survive(stack: Stack, lines: Sequence[Json], roles: Sequence[str], seed: int = 1) -> tuple[Json, int]:
    """Run a batch and kill each process of these roles once while it runs. Return the batch and the number of kills."""
    rng = random.Random(seed)
    kills = 0
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        batch_id = await submit(http, lines)
        for number, role in enumerate(roles, 1):
            await wait_for(http, batch_id, number * len(lines) // (len(roles) + 2))
            for pid in stack.living(role):
                os.kill(pid, signal.SIGKILL)
                kills += 1
                await asyncio.sleep(rng.uniform(0.1, 1.0))
        return await wait_for(http, batch_id), kills


@dataclass
class Gaps:
    """Times between two tokens of streams, in seconds."""

    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        p99 = ordered[int(0.99 * len(ordered))]
        return f"median {1000 * statistics.median(ordered):.1f} ms, p99 {1000 * p99:.1f} ms, {len(ordered)} gaps"

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]


async def stream(http: httpx.AsyncClient, model: str, gaps: Gaps, seed: int) -> None:
    """Read one stream and note the times between its tokens."""
    body = {"model": model, "prompt": f"Story {seed}:", "max_tokens": TOKENS, "seed": seed, "stream": True}
    last: float | None = None
    async with http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.seconds.append(now - last)
                last = now


async def beside(stack: Stack, model: str, seconds: float, lines: Sequence[Json]) -> tuple[Gaps, Gaps, int]:
    """Measure streams without a batch and beside one. Return both, and the lines that were answered beside them."""

    async def measure(http: httpx.AsyncClient) -> Gaps:
        gaps, end = Gaps(), time.monotonic() + seconds

        async def client(number: int) -> None:
            seed = number
            while time.monotonic() < end:
                await stream(http, model, gaps, seed)
                seed += STREAMS

        await asyncio.gather(*(client(number) for number in range(STREAMS)))
        return gaps

    async with httpx.AsyncClient(base_url=stack.url, timeout=300) as http:
        await stream(http, model, Gaps(), 0)
        alone = await measure(http)
        batch_id = await submit(http, lines)
        await wait_for(http, batch_id, 1)
        before = (await status(http, batch_id))["request_counts"]["completed"]
        beside = await measure(http)
        after = (await status(http, batch_id))["request_counts"]["completed"]
        await http.post(f"/v1/batches/{batch_id}/cancel")
        await wait_for(http, batch_id)
        return alone, beside, after - before


async def survive_kills(lines: Sequence[Json], model: str, folder: Path) -> None:
    options = (f"--store={folder / 'a.db'}", "--prefill=1", "--decode=2")
    with serve(folder / "log", model, *options) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
            began = time.monotonic()
            expected = await answers(http, await wait_for(http, await submit(http, lines)))
            print(f"undisturbed: {len(expected)} answers in {time.monotonic() - began:.0f} s")
            began = time.monotonic()
            batch, kills = await survive(stack, lines, ("gateway", "prefill", "decode"))
            found = await answers(http, batch)
    print(f"with {kills} kills: {len(found)} answers in {time.monotonic() - began:.0f} s, {batch['status']}")
    print(f"answered once: {len(dict(found)) == len(found) == len(lines)}; equal: {found == expected}")


async def run(arguments: argparse.Namespace) -> None:
    model = arguments.model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.lines:
            await survive_kills(make_lines(arguments.lines, model), model, folder)
        with serve(folder / "log", model, f"--store={folder / 'b.db'}") as stack:
            ratios: list[float] = []
            for _ in range(arguments.rounds):
                alone, together, done = await beside(stack, model, arguments.seconds, make_lines(5000, model, 64))
                print(f"ITL alone:          {alone}")
                print(f"ITL beside a batch: {together}; {done} lines answered meanwhile")
                ratios.append(together.p99 / alone.p99)
            shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"p99 beside a batch, by rounds: {shown}; median {statistics.median(ratios):.3f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lines",
        type=int,
        default=1000,
        help="lines of the batch in the first part; 0 leaves this part out [%(default)s]",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the second part [%(default)s]")
    parser.add_argument("--seconds", type=float, default=30.0, help="time of each measurement [%(default)s]")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder of the model [%(default)s]")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
