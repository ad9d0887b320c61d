"""Compare routing by cached prefix with round robin, for conversations that share long system prompts.

The figures are the hit rate and the time to the first token (TTFT).

    python -m bench.cache.routing ~/.cache/paceline/smollm2-135m-instruct --rounds 3

There are two hosts on this machine, which share no memory. Each has a prefill worker and a decode worker. Two gateways
send to them in turns, one with --router-mode kv, the other with --router-mode round-robin. Each round has a cache salt
of its own, so that it finds no blocks of other rounds. Prompts are random token ids, the same for both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.cache.prefix import Answer, ask, connect, random_tokens, start_hosts, until_complete
from bench.common.namespaces import ONE_HOST
from bench.common.services import Services
from bench.common.systems import ending_on_sigterm
from bench.serving.load import new_file, percentile, table

WAYS = ("kv", "round-robin")
MESSAGE, ANSWER = 48, 16
"""Tokens of the user's message and of the answer in each turn."""

Figures = dict[str, float]


async def converse(
    http: httpx.AsyncClient, salt: str, system: Sequence[int], messages: Sequence[Sequence[int]]
) -> list[Answer]:
    """Run the turns of a conversation. The prompt of each turn is the whole conversation so far."""
    context, answers = list(system), []
    for message in messages:
        context += message
        answers.append(await ask(http, context, ANSWER, salt))
        context += answers[-1].token_ids
    return answers


async def run_round(http: httpx.AsyncClient, salt: str, seed: int, options: argparse.Namespace) -> Figures:
    """Run all conversations in random order, `options.concurrency` at a time, and return their figures."""
    random.seed(seed)
    systems = [random_tokens(options.system_tokens) for _ in range(options.systems)]
    plans = [
        (system, [random_tokens(MESSAGE) for _ in range(options.turns)])
        for system in systems
        for _ in range(options.conversations)
    ]
    random.shuffle(plans)
    places = asyncio.Semaphore(options.concurrency)

    async def one(system: list[int], messages: list[list[int]]) -> list[Answer]:
        async with places:
            return await converse(http, salt, system, messages)

    spoken = await asyncio.gather(*(one(*plan) for plan in plans))
    answers = [answer for conversation in spoken for answer in conversation]
    first = [1e3 * conversation[0].ttft for conversation in spoken]
    later = [1e3 * answer.ttft for conversation in spoken for answer in conversation[1:]]
    return {
        "hit rate": sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
        "computed tokens": sum(a.computed_tokens for a in answers),
        "TTFT of first turns, ms, p50": percentile(first, 50),
        "TTFT of later turns, ms, p50": percentile(later, 50),
        "TTFT of all, ms, p50": percentile(first + later, 50),
        "TTFT of all, ms, p90": percentile(first + later, 90),
        "TTFT of all, ms, mean": statistics.fmean(first + later),
    }


async def measure(services: Services, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Return the figures of each round, by way."""
    names = {way: services.start_gateway(f"--router-mode={way}") for way in WAYS}
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            async with connect(services, services.url_of(names[way])) as http:
                await until_complete(http, 4)
                if not number:  # both hosts connect and compile kernels before anything is measured
                    await asyncio.gather(*(ask(http, random_tokens(1000), 4) for _ in range(4)))
                found[way].append(await run_round(http, f"{way} {number}", options.seed + number, options))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cache.routing", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--systems", type=int, default=6, help="number of system prompts")
    parser.add_argument("--system-tokens", type=int, default=1000, help="tokens of a system prompt [%(default)s]")
    parser.add_argument("--conversations", type=int, default=4, help="conversations for each system prompt")
    parser.add_argument("--turns", type=int, default=4, help="turns in each conversation")
    parser.add_argument("--concurrency", type=int, default=4, help="conversations at a time")
    parser.add_argument("--kv-memory", default="512MiB", help="KV memory of each host")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything that is random [%(default)s]")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    ending_on_sigterm()
    worker = ("--threads=1",)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Services(
                Path(folder),
                options.model,
                ONE_HOST,
                kvtransfer=(f"--kv-memory={options.kv_memory}",),
                prefill=worker,
                decode=worker,
            ) as services,
        ):
            start_hosts(services, 2)
            found = asyncio.run(measure(services, options))
    except (RuntimeError, TimeoutError) as error:
        print(f"bench.cache.routing: {error}", file=sys.stderr)
        return 1
    rows = []
    for figure in found["kv"][0]:
        kv, turns = (statistics.median(each[figure] for each in found[way]) for way in WAYS)
        rows.append([figure, f"{kv:.3g}" if kv < 1 else f"{kv:.0f}", f"{turns:.3g}" if turns < 1 else f"{turns:.0f}"])
        rows[-1].append(f"{kv / turns:.2f}" if turns else "")
    print(table(["figure, median of the rounds", *WAYS, "kv / round-robin"], rows))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
