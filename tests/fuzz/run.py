"""Send hostile bytes, calls and requests to every port of a real stack, and check that they change nothing.

    python -m tests.fuzz.run --seconds 120 --seed 1

Each port is attacked for `--seconds`, half of the time by strangers, who lack the services' secret, and half of it by
neighbours, who have the secret. Twice a minute the private memory of each process is printed. The exit code is 1 if a
process has ended, is not healthy, holds blocks, has grown, has logged an error that no input may cause, has accepted a
stranger, or gives other tokens than before.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from paceline.proto import kvtransfer_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import open_channel
from paceline.services.common.tasks import end_tasks
from tests.fuzz import raw
from tests.fuzz.calls import Caller, Valid
from tests.fuzz.stack import ROLES, FuzzStack, Usage, fuzz_stack, log_lines

ATTACKERS = 8
"""Number of attackers at a time on one port."""
MOST_GROWTH_BYTES = 48 << 20
"""Largest growth of a process's private memory since the first attacks. Caches fill, and allocators keep memory."""
MOST_GROWTH_DESCRIPTORS = 16
WARM_UP_SECONDS = 3.0
WATCH_SECONDS = 30.0
"""Time between two checks of the processes' memory."""

_STRANGERS_GET = {"UNAUTHENTICATED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}
"""Status codes that callers without the secret may get. The last four are caused by errors in the call itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """The state of a stack that attacks must not change."""

    ledger: dict[str, Any]
    answer: Any
    usage: dict[str, Usage]

    @classmethod
    async def of(cls, stack: FuzzStack) -> Sight:
        answer = await stack.answer()
        return cls(await stack.ledger(), answer, stack.usage())

    def changes(self, later: Sight, cache_may_grow: bool) -> list[str]:
        """Return a sentence for each change between two states that hostile input must not cause.

        Args:
            cache_may_grow: whether some calls came from neighbours, whose valid requests are served.
        """
        wrong = []
        if not later.ledger.get("balanced"):
            wrong.append("the ledger is out of balance")
        names = ("total", "held", "in_flight", "leases") if cache_may_grow else (*_COUNTS, "leases", "expired_leases")
        for name in names:
            if self.ledger[name] != later.ledger[name]:
                wrong.append(f"the ledger's {name} was {self.ledger[name]} and is {later.ledger[name]}")
        if self.answer != later.answer:
            wrong.append(f"the same request gave {self.answer} and gives {later.answer}")
        for role, before in self.usage.items():
            after = later.usage[role]
            if after.pid != before.pid:
                wrong.append(f"{role} is another process")
            if after.anonymous_bytes > before.anonymous_bytes + MOST_GROWTH_BYTES:
                grown = (after.anonymous_bytes - before.anonymous_bytes) >> 20
                wrong.append(f"{role} takes {grown} MiB more than before")
            if after.descriptors > before.descriptors + MOST_GROWTH_DESCRIPTORS:
                wrong.append(f"{role} has {after.descriptors} open descriptors, {before.descriptors} before")
        return wrong


_COUNTS = ("total", "free", "held", "in_flight", "cached")


async def attack(
    stack: FuzzStack, role: str, credentials: Credentials, valid: Valid, seconds: float, seed: str
) -> Counter[str]:
    """Attack one port. Return the number of each kind of attack, and the number of calls by their status."""
    end = time.monotonic() + seconds
    done: Counter[str] = Counter()
    host, _, port = stack.addresses[role].partition(":")

    async def one(number: int) -> None:
        rng = random.Random(f"{seed}-{role}-{number}")
        caller = Caller(role, stack.addresses[role], credentials, valid, rng)
        while time.monotonic() < end:
            kind = rng.choice(("noise", "http1", "http2", "calls", "calls", "calls", "calls"))
            if role == "gateway":
                kind = rng.choice(("noise", "http1", "http1", "http1", "http1", "http2"))
            if role == "kvtransfer" and valid.socket_path and rng.random() < 0.3:
                kind = "socket"
                await raw.send(valid.socket_path, valid.on_socket(rng), rng)
            elif kind == "calls":
                await caller.attack()
            else:
                data = {"noise": raw.noise, "http1": raw.http1, "http2": raw.http2}[kind](rng)
                await raw.send((host, int(port)), data, rng)
            done[kind] += 1
        await caller.close()
        done.update({f"{role} {code}": count for code, count in caller.codes.items()})

    await asyncio.gather(*(one(number) for number in range(ATTACKERS)))
    return done


@asynccontextmanager
async def neighbour(stack: FuzzStack, valid: Valid) -> AsyncIterator[Valid]:
    """Open a session with kvtransfer and a stream of events, as a faulty worker and a faulty gateway have them."""
    async with (
        open_channel(stack.addresses["kvtransfer"], stack.credentials) as channel,
        open_channel(stack.addresses["decode"], stack.credentials) as to_decode,
    ):
        request = kvtransfer_pb2.AttachRequest(worker_id="mad", role="decode", layout=valid.layout, context_tokens=64)
        call = kvtransfer_pb2_grpc.KVTransferStub(channel).Attach(request)
        event = await call.read()
        events = worker_pb2_grpc.DecodeStub(to_decode).Events(worker_pb2.EventsRequest(stream="mad"))
        await events.read()
        reading = asyncio.create_task(_read_all(events))
        yield dataclasses.replace(valid, session=event.session, socket_path=event.socket_path, stream="mad")
        await end_tasks(reading)
        call.cancel()


async def _read_all(events: AsyncIterable[worker_pb2.DecodeEvents]) -> None:
    async for _ in events:
        pass


@asynccontextmanager
async def watched(stack: FuzzStack, under_attack: str) -> AsyncIterator[None]:
    """Print the private memory of each process regularly, which shows whether it levels off."""

    async def watch() -> None:
        for number in itertools.count():
            sizes = (f"{role} {used.anonymous_bytes / (1 << 20):.1f}" for role, used in stack.usage().items())
            print(f"{under_attack}, {number * WATCH_SECONDS:.0f} s: {', '.join(sizes)} MiB", flush=True)
            await asyncio.sleep(WATCH_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        await end_tasks(watching)


async def fuzz(stack: FuzzStack, seconds: float, seed: int, roles: Sequence[str] = ROLES) -> list[str]:
    """Attack the port of each role for `seconds`. Return a sentence for each error."""
    valid = stack.valid()
    wrong: list[str] = []
    for role in roles:  # memory for imports and caches at the first error is not a leak
        await attack(stack, role, Credentials(), valid, WARM_UP_SECONDS / len(roles), f"warm {seed}")
    before = await Sight.of(stack)
    for who, trusted in (("strangers", False), ("neighbours", True)):
        start = await Sight.of(stack)
        done: Counter[str] = Counter()
        for role in roles:
            async with watched(stack, f"{who} at {role}"):
                if trusted:
                    async with neighbour(stack, valid) as known:
                        done += await attack(stack, role, stack.credentials, known, seconds / 2, f"neighbour {seed}")
                else:
                    done += await attack(stack, role, Credentials(), valid, seconds / 2, f"stranger {seed}")
        print(f"{who}: {dict(sorted(done.items()))}")
        ended = {name.split()[1] for name in done if " " in name}
        if not trusted and (heard := ended - _STRANGERS_GET):
            wrong.append(f"strangers were answered with {sorted(heard)}")
        if dead := [role for role, process in stack.processes.items() if not process.alive]:
            return [*wrong, f"ended: {dead}"]
        if not await stack.healthy():
            wrong.append("not every service is healthy")
        wrong += start.changes(await Sight.of(stack), cache_may_grow=trusted)
    after = await Sight.of(stack)
    for role, used in before.usage.items():
        now = after.usage[role]
        print(
            f"{role:<10} {used.anonymous_bytes >> 20} -> {now.anonymous_bytes >> 20} MiB private, "
            f"{used.descriptors} -> {now.descriptors} descriptors"
        )
    return wrong + before.changes(after, cache_may_grow=True) + stack.complaints()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="time for each port [%(default)s]")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES, help="services to attack; default: all")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, fuzz_stack(Path(folder)) as stack:
        wrong = asyncio.run(fuzz(stack, arguments.seconds, arguments.seed, arguments.roles))
        for sentence in wrong[:40]:
            print(f"WRONG: {sentence}", file=sys.stderr)
        if wrong:
            for role in ROLES:
                print(f"---- {role}\n" + "\n".join(log_lines(stack.processes[role])[-40:]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
