"""Scale workers down and up, drain them and exchange their roles under steady load, and compare every answer.

    python -m bench.fleet.flips --actions 200 --seed 7
    PACELINE_ADMIN_KEY=... python -m bench.fleet.flips --url http://127.0.0.1:8000 --actions 200

The first command starts a stack with `paceline serve`. The second one uses a stack that runs already, for example that
of docker compose with the profile `planner`: then the planner starts and ends the workers. Begin when `/fleet` of the
gateway names the planner.

The same requests are sent without any action first. Then they are sent again and again while actions of a seed happen:
a role gets more or fewer workers, a worker drains, a worker changes between prefill and decode, two workers exchange
their roles. A stream is lost if it is refused, breaks or ends early. It is changed if its tokens, text or end differ
from those of the first time. The exit code is 1 if any is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

from bench.common.mixed import Outcome, Request, answers, ask, requests
from bench.common.services import serving
from paceline.core.env import admin_keys

VOCABULARY = 49_152
STREAMS = 6
LEAST, MOST = {"prefill": 0, "decode": 1}, {"prefill": 2, "decode": 2}
"""Bounds of the number of workers of each role."""
OTHER = {"prefill": "decode", "decode": "prefill"}
SETTLE_SECONDS = 120.0
"""Longest time until a fleet has carried out an action, in seconds. A worker reads its model in this time."""
PAUSE_SECONDS = (0.2, 1.5)
"""Shortest and longest time between two actions, in seconds."""


@dataclass
class Tally:
    """The outcomes of the streams, and the actions that happened."""

    actions: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Fleet:
    """The workers of a running stack, changed by requests to its gateway.

    Args:
        client: client of the gateway, with the key of an admin if the gateway has one.
        wanted: present number of workers of each role.
        has_planner: whether a planner starts and ends workers.
    """

    def __init__(self, client: httpx.AsyncClient, wanted: dict[str, int], has_planner: bool) -> None:
        self._client = client
        self._wanted = wanted
        self._has_planner = has_planner
        # A planner lets the last worker of a role leave only if there is no load.
        self._least = {role: max(least, int(has_planner)) for role, least in LEAST.items()}
        self._roles: dict[str, str] = {}
        """The newest role of each worker that has changed its role, by id."""
        self._workers: dict[str, list[str]] = {}
        """Ids of each role's workers when the fleet was settled last."""

    @classmethod
    async def open(cls, client: httpx.AsyncClient) -> Fleet:
        """Return the fleet as it is. If it has a planner, the planner keeps the numbers of workers from now on."""
        state, fleet = [(await client.get(path)).raise_for_status().json() for path in ("/fleet/scale", "/fleet")]
        opened = cls(client, {role: state[role]["wanted"] for role in LEAST}, bool(fleet["planners"]))
        if fleet["planners"]:
            await opened._post(opened._wanted)
        return opened

    async def settle(self) -> None:
        """Wait until the gateway sees all wanted workers ready in their roles and none drains. Raises TimeoutError."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                if await self._is_settled():
                    return
                await asyncio.sleep(0.1)

    async def act(self, rng: random.Random) -> str:
        """Begin a random action that the bounds of both roles allow. Return its name. The fleet must be settled."""
        workers = self._workers
        fewer = [role for role in LEAST if len(workers[role]) > self._least[role]]
        more = [role for role in LEAST if len(workers[role]) < MOST[role]]
        # Flips between full roles exchange two workers.
        choices = {"flip": [role for role in fewer if OTHER[role] in more], "drain": fewer, "down": fewer, "up": more}
        choices["exchange"] = ["both"] if workers["prefill"] and len(workers["decode"]) > LEAST["decode"] else []
        if self._has_planner:
            del choices["drain"]  # the planner chooses the worker that leaves
        name = rng.choice([name for name, roles in choices.items() if roles])
        role = rng.choice(choices[name])
        if name == "exchange":
            await self._flip({rng.choice(workers[each]): OTHER[each] for each in OTHER})
        elif name == "flip":
            await self._flip({rng.choice(workers[role]): OTHER[role]})
        else:
            self._wanted[role] += 1 if name == "up" else -1
            await self._post({"drain": [rng.choice(workers[role])]} if name == "drain" else {role: self._wanted[role]})
        return name

    async def _flip(self, roles: Mapping[str, str]) -> None:
        for role in roles.values():
            self._wanted[role] += 1
            self._wanted[OTHER[role]] -= 1
        self._roles |= roles
        await self._post({"flip": roles})

    async def _post(self, body: Mapping[str, Any]) -> None:
        answer = await self._client.post("/fleet/scale", json=body)
        if answer.is_error:
            raise RuntimeError(f"{body} was refused: {answer.text}")

    async def _is_settled(self) -> bool:
        """Read the state of the fleet, and return whether it is the wanted one."""
        state, fleet = [(await self._client.get(path)).raise_for_status().json() for path in ("/fleet/scale", "/fleet")]
        seen = [each for each in fleet["workers"] if each["role"] in LEAST]
        self._workers = {role: [each["worker_id"] for each in seen if each["role"] == role] for role in LEAST}
        # The planner must have seen a flip before the next number comes, which would be the older one for it.
        is_known = all(self._wanted.items() <= each["pinned"].items() for each in fleet["planners"])
        is_calm = all(counts["ready"] == counts["wanted"] and not counts["draining"] for counts in state.values())
        is_flipped = all(self._roles.get(each["worker_id"], each["role"]) == each["role"] for each in seen)
        is_full = all(len(self._workers[role]) == state[role]["wanted"] == self._wanted[role] for role in LEAST)
        return is_known and is_calm and is_flipped and is_full and all(each["state"] == "ready" for each in seen)


def long_requests(count: int, seed: int) -> list[Request]:
    """Return requests of all kinds whose clients do not leave, and an equal number that run for some seconds."""
    rng = random.Random(seed)
    asked = [replace(each, leaves_after=None) for each in requests(count // 2, seed, VOCABULARY)]
    while len(asked) < count:
        prompt = [rng.randrange(100, VOCABULARY - 1000) for _ in range(rng.randint(20, 300))]
        body = {"prompt": prompt, "max_tokens": rng.randint(60, 160), "ignore_eos": True, "stream": True}
        sampling = {"temperature": rng.choice([0.0, 0.8]), "seed": len(asked), "return_token_ids": True}
        asked.append(Request({**body, **sampling}))
    return asked


async def disturbed(
    client: httpx.AsyncClient,
    fleet: Fleet,
    asked: Sequence[Request],
    expected: Sequence[Outcome],
    actions: int,
    seed: int,
) -> Tally:
    """Carry out actions under steady load, and return the outcomes of the streams."""
    tally, over, began = Tally(), asyncio.Event(), time.monotonic()

    async def stream(first: int) -> None:
        number = first
        while not over.is_set():
            index = number % len(asked)
            number += STREAMS
            try:
                difference = (await ask(client, asked[index])).difference(expected[index])
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
            await _act(fleet, random.Random(seed), actions, tally)
        finally:
            over.set()
    tally.seconds = time.monotonic() - began
    return tally


async def _act(fleet: Fleet, rng: random.Random, actions: int, tally: Tally) -> None:
    for _ in range(actions):
        await asyncio.sleep(rng.uniform(*PAUSE_SECONDS))
        await fleet.settle()
        tally.actions[await fleet.act(rng)] += 1
    await fleet.settle()


async def measure(url: str, model: str, actions: int, count: int, seed: int) -> Tally:
    """Return the outcomes of the streams of a running stack, which has at least one worker of each role."""
    asked = long_requests(count, seed)
    headers = {"Authorization": f"Bearer {admin_keys()[0]}"} if admin_keys() else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, trust_env=False) as client:
        fleet = await Fleet.open(client)
        await fleet.settle()
        expected = await answers(url, model, asked, concurrency=STREAMS)
        asked = [replace(each, body={"model": model, **each.body}) for each in asked]
        return await disturbed(client, fleet, asked, expected, actions, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--url", help="gateway of a running stack, whose admin key is in $PACELINE_ADMIN_KEY")
    parser.add_argument("--actions", type=int, default=200)
    parser.add_argument("--requests", type=int, default=40, help="number of different requests [%(default)s]")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    flags = ("--prefill=2", "--decode=2", "--threads=1", "--kv-memory=512MiB", "--local-prefill-tokens=0")
    facts = options.model, options.actions, options.requests, options.seed
    with contextlib.ExitStack() as undo:
        url = options.url
        if not url:
            folder = undo.enter_context(tempfile.TemporaryDirectory())
            _, url = undo.enter_context(serving(Path(folder) / "log", options.model, *flags))
        tally = asyncio.run(measure(url, *facts))
    result = {**vars(tally), "actions": dict(tally.actions), "seed": options.seed}
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if tally.lost or tally.changed else 0


if __name__ == "__main__":
    sys.exit(main())
