"""Scale workers down and up, drain them and exchange their roles under steady load, and compare every answer.

    python -m bench.flips --actions 200 --seed 7

The same requests are sent without any action first. Then they are sent again and again while actions of a seed happen:
a role gets more or fewer workers, a worker drains, a worker changes between prefill and decode, two workers exchange
their roles. A stream is lost if it is refused, breaks or ends early. It is changed if its tokens, text or end differ
from those of the first time. The exit code is 1 if any is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from bench.mixed import Outcome, Request, answers, ask, requests
from bench.services import serving

VOCABULARY = 49_152
STREAMS = 6
LEAST, MOST = {"prefill": 0, "decode": 1}, {"prefill": 2, "decode": 2}
"""Bounds of the number of workers of each role."""
SETTLE_SECONDS = 120.0
"""Longest time until a fleet has carried out an action, in seconds. A worker reads its model in this time."""
PAUSE_SECONDS = (0.2, 1.5)
"""Shortest and longest time between two actions, in seconds."""


@dataclass
class Tally:
    """What became of the streams, and which actions happened."""

    actions: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def long_requests(count: int, seed: int) -> list[Request]:
    """Return requests of all kinds without clients that leave, and as many that run for some seconds."""
    rng = random.Random(seed)
    asked = [replace(each, leaves_after=None) for each in requests(count // 2, seed, VOCABULARY)]
    while len(asked) < count:
        prompt = [rng.randrange(100, VOCABULARY - 1000) for _ in range(rng.randint(20, 300))]
        body = {"prompt": prompt, "max_tokens": rng.randint(60, 160), "ignore_eos": True, "stream": True}
        sampling = {"temperature": rng.choice([0.0, 0.8]), "seed": len(asked), "return_token_ids": True}
        asked.append(Request({**body, **sampling}))
    return asked


async def disturbed(
    url: str, model: str, asked: Sequence[Request], expected: Sequence[Outcome], actions: int, seed: int
) -> Tally:
    """Carry out actions under steady load, and return what became of the streams."""
    tally, over, began = Tally(), asyncio.Event(), time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def stream(first: int) -> None:
            number = first
            while not over.is_set():
                index = number % len(asked)
                number += STREAMS
                request = replace(asked[index], body={"model": model, **asked[index].body})
                try:
                    difference = (await ask(client, request)).difference(expected[index])
                except httpx.HTTPError as error:
                    tally.lost.append(f"request {index}: {error}")
                    continue
                tally.compared += 1
                if difference:
                    tally.changed.append(f"request {index}: {difference}")

        async with asyncio.TaskGroup() as group:
            for first in range(STREAMS):
                group.create_task(stream(first))
            try:
                await _act(client, random.Random(seed), actions, tally)
            finally:
                over.set()
    tally.seconds = time.monotonic() - began
    return tally


async def _act(client: httpx.AsyncClient, rng: random.Random, actions: int, tally: Tally) -> None:
    flipped: dict[str, str] = {}
    for _ in range(actions):
        await asyncio.sleep(rng.uniform(*PAUSE_SECONDS))
        name, body = _action(rng, await settled(client, flipped))
        answer = await client.post("/fleet/scale", json=body)
        if answer.is_error:
            raise RuntimeError(f"{body} was refused: {answer.text}")
        tally.actions[name] += 1
        flipped |= body.get("flip", {})
    await settled(client, flipped)


def _action(rng: random.Random, workers: dict[str, list[str]]) -> tuple[str, dict[str, Any]]:
    """Return the name and the body of an action that the bounds of both roles allow.

    Args:
        workers: for each role, the ids of its workers, which are all ready.
    """
    other = {"prefill": "decode", "decode": "prefill"}
    fewer = [role for role in LEAST if len(workers[role]) > LEAST[role]]
    more = [role for role in LEAST if len(workers[role]) < MOST[role]]
    # Flips between full roles exchange two workers.
    choices = {"flip": [role for role in fewer if other[role] in more], "drain": fewer, "down": fewer, "up": more}
    choices["exchange"] = ["both"] if workers["prefill"] and len(workers["decode"]) > LEAST["decode"] else []
    name = rng.choice([name for name, roles in choices.items() if roles])
    role = rng.choice(choices[name])
    if name == "exchange":
        return name, {"flip": {rng.choice(workers[each]): other[each] for each in other}}
    if name == "flip":
        return name, {"flip": {rng.choice(workers[role]): other[role]}}
    if name == "drain":
        return name, {"drain": [rng.choice(workers[role])]}
    return name, {role: len(workers[role]) + (1 if name == "up" else -1)}


async def settled(client: httpx.AsyncClient, flipped: Mapping[str, str]) -> dict[str, list[str]]:
    """Wait until the gateway sees all wanted workers ready and none drains. Return the ids of each role's workers.

    Args:
        flipped: the newest role of each worker that has got another one.
    """
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            state = (await client.get("/fleet/scale")).json()
            seen = [each for each in (await client.get("/fleet")).json()["workers"] if each["role"] in LEAST]
            workers = {role: [each["worker_id"] for each in seen if each["role"] == role] for role in LEAST}
            is_calm = all(own["ready"] == own["wanted"] and not own["draining"] for own in state.values())
            is_seen = all(flipped.get(each["worker_id"], each["role"]) == each["role"] for each in seen)
            is_seen = is_seen and all(len(workers[role]) == state[role]["wanted"] for role in LEAST)
            if is_calm and is_seen and all(each["state"] == "ready" for each in seen):
                return workers
            await asyncio.sleep(0.1)


async def measure(url: str, model: str, actions: int, count: int, seed: int) -> Tally:
    """Return what became of the streams of a running stack, which has one worker of each role at least."""
    asked = long_requests(count, seed)
    expected = await answers(url, model, asked, concurrency=STREAMS)
    return await disturbed(url, model, asked, expected, actions, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--actions", type=int, default=200)
    parser.add_argument("--requests", type=int, default=40, help="number of different requests [%(default)s]")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    flags = ("--prefill=2", "--decode=2", "--threads=1", "--kv-memory=512MiB", "--local-prefill-tokens=0")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log", options.model, *flags) as (_, url):
        tally = asyncio.run(measure(url, options.model, options.actions, options.requests, options.seed))
    result = {**vars(tally), "actions": dict(tally.actions), "seed": options.seed}
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if tally.lost or tally.changed else 0


if __name__ == "__main__":
    sys.exit(main())
