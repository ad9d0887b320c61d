"""Measure the gain from a cached prefix: TTFT of a prompt that is cached nowhere, on the same host, or on another host.

It also measures how many tokens of each turn of a conversation are computed.

    python -m bench.cache.prefix ~/.cache/paceline/smollm2-135m-instruct --prompt-tokens 2000 --prompts 6 --turns 10

There are two hosts on this machine, which share no memory. Each has a prefill worker and a decode worker. Prompts are
random token ids, sent one after the other. "cold" prompts are new. "warm" is the same prompt again with 32 other tokens
at its end. Before "elsewhere" the workers of host 0, which computed all prompts, are stopped. The workers of host 1
then serve the prompts, and kvtransfer of host 1 first fetches the prefix from kvtransfer of host 0.

    python -m bench.cache.prefix ~/.cache/paceline/smollm2-135m-instruct --disk /var/tmp --kv-memory 256MiB

With --disk there is one host with a disk tier in this folder. Before "disk" other prompts have driven all blocks out of
the arena. The disk is read with direct I/O, without the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.common.namespaces import ONE_HOST
from bench.common.services import Services
from bench.common.systems import ending_on_sigterm
from bench.serving.load import new_file, table

KINDS = ("cold", "warm", "elsewhere", "disk")
START_SECONDS = 180.0
KNOWN_SECONDS = 1.0
"""Time until gateways know of new full blocks, in seconds."""
MESSAGE, ANSWER = 60, 24
"""Tokens of the user's message and of the answer in each turn of the conversation."""
NEW = 32
"""Tokens at the end of a warm prompt that are not cached."""


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    """Seconds from sending the request to the first chunk."""
    second: float
    """Seconds from sending the request to the second chunk; NaN if there is none."""
    token_ids: list[int]

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def connect(services: Services, url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers=services.admin, timeout=120, trust_env=False)


async def ask(http: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int = 1, salt: str | None = None) -> Answer:
    """Send a prompt of token ids and return the answer. Raises RuntimeError if the request fails."""
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": salt,
    }
    token_ids: list[int] = []
    usage: dict[str, Any] = {}
    sent, chunks = time.perf_counter(), list[float]()
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if reply.status_code != 200 or '"error"' in line:
                raise RuntimeError(f"a request failed: {line}")
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if tokens := [id for choice in event["choices"] for id in choice.get("token_ids") or ()]:
                    chunks.append(time.perf_counter() - sent)
                    token_ids += tokens
                usage = event.get("usage") or usage
    first, second, *_ = [*chunks, math.nan, math.nan]
    return Answer(len(prompt), usage["prompt_tokens_details"]["cached_tokens"], first, second, token_ids)


def random_tokens(count: int) -> list[int]:
    return random.choices(range(1000, 20_000), k=count)


def start_hosts(services: Services, count: int) -> None:
    """Start kvtransfer, a prefill worker and a decode worker on each host, and wait until the workers are ready."""
    for host in range(count):
        services.start_kvtransfer(host)
    workers = [services.start_worker(role, host, host=host) for host in range(count) for role in ("prefill", "decode")]
    services.wait_ready(*workers)


async def until_complete(http: httpx.AsyncClient, workers: int) -> None:
    """Wait until the gateway sees exactly `workers` ready prefill and decode workers. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                fleet = (await http.get("/fleet")).json()["workers"]
                ready = [worker for worker in fleet if worker["state"] == "ready"]
                if sum(worker["role"] in ("prefill", "decode") for worker in ready) == workers:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def measure(services: Services, prompt_tokens: int, prompts: int, turns: int) -> dict[str, list[Answer]]:
    """Return the answers by kind, one per prompt, and the answers of the conversation's turns."""
    found: dict[str, list[Answer]] = {"turns": [], **{kind: [] for kind in KINDS}}
    async with connect(services, services.url) as http:
        await until_complete(http, 4)
        for _ in range(8):  # warm-up: both hosts connect and compile kernels
            await ask(http, random_tokens(prompt_tokens), 4)
        context = random_tokens(MESSAGE)
        for _ in range(turns):
            found["turns"].append(await ask(http, context, ANSWER))
            context += found["turns"][-1].token_ids + random_tokens(MESSAGE)
            await asyncio.sleep(KNOWN_SECONDS)
        services.processes["decode-1"].stop()
        services.processes["prefill-1"].stop()
        await until_complete(http, 2)
        known = [random_tokens(prompt_tokens) for _ in range(prompts)]
        for prompt in known:
            found["cold"].append(await ask(http, prompt, 4))
            await asyncio.sleep(KNOWN_SECONDS)
            found["warm"].append(await ask(http, prompt[:-NEW] + random_tokens(NEW), 4))
        services.start_again("decode-1")
        services.start_again("prefill-1")
        services.wait_ready("decode-1", "prefill-1")
        services.processes["decode-0"].stop()
        services.processes["prefill-0"].stop()
        await until_complete(http, 2)
        for _ in range(2):  # warm-up, in which the rate of transfers between the hosts is measured too
            await ask(http, random_tokens(prompt_tokens), 4)
        for prompt in known:
            found["elsewhere"].append(await ask(http, prompt[:-NEW] + random_tokens(NEW), 4))
            await asyncio.sleep(KNOWN_SECONDS)
    return found


async def measure_disk(services: Services, prompt_tokens: int, prompts: int) -> dict[str, list[Answer]]:
    """Return the answers by kind, one per prompt. Raises RuntimeError if they were not read from the disk itself."""
    found: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
    async with connect(services, services.url) as http:
        await until_complete(http, 2)
        for _ in range(2):
            await ask(http, random_tokens(prompt_tokens), 4)
        known = [random_tokens(prompt_tokens) for _ in range(prompts)]
        for prompt in known:
            found["cold"].append(await ask(http, prompt, 4))
            await asyncio.sleep(KNOWN_SECONDS)
            found["warm"].append(await ask(http, prompt[:-NEW] + random_tokens(NEW), 4))
        before = await kvtransfer_stats(http)
        now = before
        while now["evicted_blocks"] - before["evicted_blocks"] < before["blocks_cached"]:
            await ask(http, random_tokens(prompt_tokens))
            now = await kvtransfer_stats(http)
        for prompt in known:
            found["disk"].append(await ask(http, prompt[:-NEW] + random_tokens(NEW), 4))
        read = (await kvtransfer_stats(http))["disk_read_blocks"] - now["disk_read_blocks"]
    if not read or "no direct I/O" in services.processes["kvtransfer-0"].text:
        raise RuntimeError("nothing was read from the disk, or its folder has no direct I/O: choose another folder")
    print(f"{read:.0f} blocks were read from the disk", file=sys.stderr)
    return found


async def kvtransfer_stats(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the statistics of the only kvtransfer, after a pause in which they become current."""
    await asyncio.sleep(KNOWN_SECONDS)
    fleet = (await http.get("/fleet")).json()["workers"]
    return dict(next(member["stats"] for member in fleet if member["role"] == "kvtransfer"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cache.prefix", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--prompts", type=int, default=6, help="number of prompts [%(default)s]")
    parser.add_argument("--turns", type=int, default=10, help="turns of the conversation [%(default)s]")
    parser.add_argument("--kv-memory", default="1GiB", help="KV memory of each host")
    parser.add_argument("--disk", type=Path, help="folder for a disk tier; it is measured instead of a second host")
    parser.add_argument("--kv-disk-size", default="2GiB", help="size of the disk tier's file [%(default)s]")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    ending_on_sigterm()
    memory = [f"--kv-memory={options.kv_memory}"]
    if options.disk:
        # With the default policy, prompts that come only once would not evict prompts that came twice.
        memory += [f"--kv-disk-dir={options.disk}", f"--kv-disk-size={options.kv_disk_size}", "--cache-policy=lru"]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Services(Path(folder), options.model, ONE_HOST, kvtransfer=memory) as stack,
        ):
            start_hosts(stack, 1 if options.disk else 2)
            stack.start_gateway()
            if options.disk:
                found = asyncio.run(measure_disk(stack, options.prompt_tokens, options.prompts))
            else:
                found = asyncio.run(measure(stack, options.prompt_tokens, options.prompts, options.turns))
    except (RuntimeError, TimeoutError) as error:
        print(f"bench.cache.prefix: {error}", file=sys.stderr)
        return 1
    print(report(found, options.prompt_tokens))
    if options.out:
        figures = {kind: [dataclasses.asdict(answer) for answer in answers] for kind, answers in found.items()}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def report(found: dict[str, list[Answer]], prompt_tokens: int) -> str:
    """Return tables of the medians of each kind, and of the conversation's turns."""
    measured = [kind for kind in KINDS if found[kind]]
    cold, *_ = medians = [
        (statistics.median(each.ttft for each in found[kind]), statistics.median(each.second for each in found[kind]))
        for kind in measured
    ]
    rows = [
        [
            kind,
            f"{statistics.median(each.computed_tokens for each in found[kind]):g}",
            *(f"{1e3 * seconds:.0f} ({cold[which] / seconds:.1f})" for which, seconds in enumerate(times)),
        ]
        for kind, times in zip(measured, medians)
    ]
    columns = ["computed tokens", "first token, ms (cold takes times)", "second token, ms (cold takes times)"]
    text = table([f"{prompt_tokens} tokens, medians", *columns], rows)
    if turns := found.get("turns"):
        sizes = [[str(turn.prompt_tokens), str(turn.computed_tokens)] for turn in turns]
        numbered = [[str(number), *size] for number, size in enumerate(sizes, 1)]
        text += f"\n\nconversation: each turn brings {MESSAGE} tokens and the {ANSWER} of the answer before\n"
        text += table(["turn", "prompt tokens", "computed"], numbered)
    return text


if __name__ == "__main__":
    sys.exit(main())
