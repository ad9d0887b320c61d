"""The conformance suite of the transports. The source is in another process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source, Transport
from tests.services.kvtransfer.transport_cases import TRANSPORTS, arena, content, missing

pytestmark = pytest.mark.slow

SLOT = 1 << 20
SLOTS = 96
POISON = 0xAA
WAIT = 60.0


class Other:
    """The other host: a process that serves SLOTS slots."""

    def __init__(self, process: asyncio.subprocess.Process, source: Source) -> None:
        self.process = process
        self.source = source

    def signal(self, number: int) -> None:
        """Send a signal. After SIGSTOP, wait until the process stands still, which takes a while on a busy machine."""
        self.process.send_signal(number)
        while number == signal.SIGSTOP and self._state() not in "TZ":
            time.sleep(0.005)

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Pair(NamedTuple):
    transport: Transport
    memory: ArenaMemory
    other: Other

    def array(self) -> np.ndarray:
        """Return the local arena as an array with one row per slot."""
        return np.frombuffer(self.memory.blocks, np.uint8).reshape(self.memory.slots, self.memory.slot_bytes)

    async def read(self, slots: list[tuple[int, int]], source: Source | None = None) -> None:
        async with asyncio.timeout(WAIT):
            await self.transport.read(source or self.other.source, slots)

    def assert_holds(self, slots: list[tuple[int, int]]) -> None:
        """Check that these slots hold the other host's content, and that all other slots are unchanged."""
        rows, came = self.array(), {here: there for there, here in slots}
        for here, row in enumerate(rows):
            expected = content(came[here], len(row)) if here in came else POISON
            assert np.all(row == expected), f"slot {here}, which should hold {came.get(here, 'poison')}"

    async def beginning(self, slots: list[tuple[int, int]]) -> asyncio.Task[None]:
        """Start a read, and stop the other host after the first bytes have arrived. Return the read, which waits."""
        rows = self.array()
        for _ in range(20):
            rows[:] = POISON
            task = asyncio.create_task(self.transport.read(self.other.source, slots))
            async with asyncio.timeout(WAIT):
                while np.all(rows[:, 0] == POISON) and not task.done():
                    await asyncio.sleep(0)
            self.other.signal(signal.SIGSTOP)
            await asyncio.sleep(0.2)
            if not task.done():
                return task
            self.other.signal(signal.SIGCONT)  # the read had ended before the stop
            await task
        raise AssertionError("every read ended before the other host was stopped")


@contextlib.asynccontextmanager
async def other_host(name: str, slots: int = SLOTS, slot_bytes: int = SLOT) -> AsyncIterator[Other]:
    arguments = ("-m", "tests.services.kvtransfer.transport_cases", name, str(slots), str(slot_bytes))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT):
            address, offer = json.loads(await process.stdout.readline())
        yield Other(process, Source("other", address, bytes.fromhex(offer)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture
async def pair(name: str) -> AsyncIterator[Pair]:
    memory = arena(SLOTS, SLOT)
    async with TRANSPORTS[name](memory) as (transport, _), other_host(name) as other:
        made = Pair(transport, memory, other)
        made.array()[:] = POISON
        yield made


async def test_blocks_come_to_their_slots_and_nowhere_else(pair: Pair) -> None:
    slots = [(5, 0), (0, 7), (95, 95), (5, 40)]
    await pair.read(slots)
    pair.assert_holds(slots)


async def test_no_blocks_are_read_at_once_from_anybody(pair: Pair) -> None:
    await pair.read([])
    await pair.read([], Source("nobody", "127.0.0.1:1", b"no offer"))
    pair.assert_holds([])


async def test_a_whole_arena_in_any_order_again_and_again(pair: Pair) -> None:
    for seed in range(3):
        here = list(range(SLOTS))
        random.Random(seed).shuffle(here)
        slots = list(zip(range(SLOTS), here))
        await pair.read(slots)
        pair.assert_holds(slots)


@pytest.mark.parametrize("slot_bytes", [4096, 368640])
async def test_thousands_of_small_blocks(name: str, slot_bytes: int) -> None:
    slots = (32 << 20) // slot_bytes
    memory = arena(slots, slot_bytes)
    async with TRANSPORTS[name](memory) as (transport, _), other_host(name, slots, slot_bytes) as other:
        pair = Pair(transport, memory, other)
        pairs = [(slots - 1 - slot, slot) for slot in range(slots)]
        await pair.read(pairs)
        pair.assert_holds(pairs)


async def test_reads_at_the_same_time_keep_apart(pair: Pair) -> None:
    slots = [(slot, SLOTS - 1 - slot) for slot in range(SLOTS - 6)]
    await asyncio.gather(*(pair.read(slots[start : start + 5]) for start in range(0, len(slots), 5)))
    pair.assert_holds(slots)


async def test_both_ways_at_the_same_time(pair: Pair, name: str) -> None:
    """A host serves reads while it reads itself. Here it also reads from its own arena."""
    own = arena(4, SLOT)
    async with TRANSPORTS[name](own) as (transport, address):
        own.slot(0)[:] = content(50, SLOT).data
        here = Source("itself", address, transport.offer())
        others = pair.other.source
        await asyncio.gather(transport.read(others, [(1, 1)]), transport.read(here, [(0, 2)]))
        assert own.slot(1) == content(1, SLOT).data
        assert own.slot(2) == content(50, SLOT).data


async def test_a_slot_that_is_not_here_is_the_callers_mistake(pair: Pair) -> None:
    for wrong in (SLOTS, -1):
        with pytest.raises(ValueError, match=str(SLOTS)):
            await pair.read([(0, 0), (0, wrong)])
    pair.assert_holds([])


async def test_a_slot_that_is_not_there_is_refused(pair: Pair) -> None:
    for wrong in (SLOTS, 1 << 31, -1):
        with pytest.raises(UnavailableError, match="other"):
            await pair.read([(0, 0), (wrong, 1)])
    pair.assert_holds([])
    await pair.read([(3, 3)])
    pair.assert_holds([(3, 3)])


async def test_an_arena_with_other_slots_is_refused(pair: Pair, name: str) -> None:
    async with other_host(name, 4, SLOT // 2) as other:
        with pytest.raises(UnavailableError, match="other"):
            await pair.read([(0, 0)], other.source)
    pair.assert_holds([])


async def test_garbage_for_an_offer_is_refused_and_changes_nothing(pair: Pair) -> None:
    good, source = pair.other.source.offer, random.Random(0)
    wrong = [b"", b"\0", good[:-1], good + b"\0", source.randbytes(len(good)), source.randbytes(5000)]
    for place in range(len(good)):
        wrong.append(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
    for offer in wrong:
        with pytest.raises(UnavailableError):
            await pair.read([(0, 0)], dataclasses.replace(pair.other.source, offer=offer))
    pair.assert_holds([])
    await pair.read([(0, 0)])
    pair.assert_holds([(0, 0)])


async def test_a_source_that_is_gone_before(pair: Pair) -> None:
    await pair.read([(0, 0)])
    await pair.other.kill()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="other"):
            await pair.read([(1, 1)])
    pair.assert_holds([(0, 0)])


async def test_a_source_that_is_killed_amid_a_read(pair: Pair) -> None:
    task = await pair.beginning([(slot, slot) for slot in range(SLOTS)])
    await pair.other.kill()
    with pytest.raises(UnavailableError, match="other"):
        await asyncio.wait_for(task, WAIT)
    pair.array()[:] = POISON
    await asyncio.sleep(0.3)
    pair.assert_holds([])


@pytest.mark.parametrize("known", [False, True])
async def test_a_silent_source_is_given_up_and_comes_back(pair: Pair, known: bool) -> None:
    if known:
        await pair.read([(0, 0)])
    pair.other.signal(signal.SIGSTOP)
    open_files = []
    for _ in range(4):
        with pytest.raises(UnavailableError, match="other"):
            await pair.read([(1, 1)])
        open_files.append(len(os.listdir("/proc/self/fd")))
    # A leak would add one each time. Other parts of this process may open a file meanwhile.
    assert open_files[3] <= open_files[1] + 1
    pair.array()[:] = POISON
    pair.other.signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    pair.assert_holds([])
    async with asyncio.timeout(WAIT):
        while True:
            with contextlib.suppress(UnavailableError):
                await pair.read([(2, 2)])
                break
    pair.assert_holds([(2, 2)])


@pytest.mark.parametrize("times", [1, 3])
async def test_a_read_that_is_cancelled_writes_nothing_later(pair: Pair, times: int) -> None:
    task = await pair.beginning([(slot, slot) for slot in range(SLOTS)])
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT)
    pair.array()[:] = POISON
    pair.other.signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    pair.assert_holds([])
    await pair.read([(4, 4)])
    pair.assert_holds([(4, 4)])


async def test_cancelling_one_read_disturbs_no_other(pair: Pair) -> None:
    half = SLOTS // 2
    slots, others = [(slot, slot) for slot in range(half)], [(slot, slot + half) for slot in range(half)]
    for seed in range(5):
        doomed = asyncio.create_task(pair.read(others))
        lasting = asyncio.create_task(pair.read(slots))
        await asyncio.sleep(random.Random(seed).random() * 0.03)
        doomed.cancel()
        await asyncio.wait([doomed], timeout=WAIT)
        pair.array()[half:] = POISON
        await lasting
        pair.assert_holds(slots)


async def test_closing_ends_what_is_under_way_and_nothing_is_written_later(pair: Pair) -> None:
    task = await pair.beginning([(slot, slot) for slot in range(SLOTS)])
    async with asyncio.timeout(WAIT):
        await pair.transport.close()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(task, WAIT)
    pair.array()[:] = POISON
    pair.other.signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    pair.assert_holds([])
    with pytest.raises(UnavailableError):
        await pair.read([(0, 0)])
    await pair.transport.close()


async def test_nothing_is_left_open(name: str) -> None:
    async def use_and_break() -> None:
        memory = arena(SLOTS, SLOT)
        async with TRANSPORTS[name](memory) as (transport, _), other_host(name) as other:
            pair = Pair(transport, memory, other)
            await pair.read([(slot, slot) for slot in range(8)])
            for _ in range(2):
                task = await pair.beginning([(slot, slot) for slot in range(SLOTS)])
                task.cancel()
                await asyncio.wait([task], timeout=WAIT)
                other.signal(signal.SIGCONT)
            await other.kill()
            with pytest.raises(UnavailableError):
                await pair.read([(0, 0)])

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    await use_and_break()
    await asyncio.sleep(1.0)
    files, threads = left()
    for _ in range(2):
        await use_and_break()
    # gRPC ends connections and idle threads after a while, and the number of its threads varies.
    async with asyncio.timeout(WAIT):
        while left()[0] > files or left()[1] > threads + 8:
            await asyncio.sleep(0.1)
