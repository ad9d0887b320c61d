"""The self-test of paths: what works is measured, what does not is named, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.self_test import SLOW_GIGABYTES_PER_SECOND, self_test
from paceline.services.kvtransfer.transport import ArenaMemory, Source
from tests.services.kvtransfer.transports import TRANSPORTS, arena, missing

SLOT, SLOTS = 1 << 16, 8


class Copy:
    """A transport within one arena."""

    def __init__(self, memory: ArenaMemory, name: str = "copy", seconds: float = 0.0) -> None:
        self.name = name
        self._memory = memory
        self._seconds = seconds

    def offer(self) -> bytes:
        return b"mine"

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        assert source.offer == b"mine"
        await asyncio.sleep(self._seconds)
        for there, here in slots:
            self._memory.slot(here)[:] = self._memory.slot(there)

    async def close(self) -> None:
        pass


class Broken(Copy):
    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        raise UnavailableError("the cable is cut")


class Forgetful(Copy):
    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        await super().read(source, slots[:-1])


class Hanging(Copy):
    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        await asyncio.Event().wait()


async def test_the_faster_comes_first_and_what_fails_last_with_its_reason() -> None:
    memory = arena(SLOTS, SLOT)
    made = [
        Broken(memory, "broken"),
        Copy(memory, "slower", 0.002),
        Forgetful(memory, "forgetful"),
        Copy(memory, "fast"),
        Hanging(memory, "hanging"),
    ]
    paths = await asyncio.wait_for(self_test(made, memory, "127.0.0.1:1"), 30)
    assert [path.name for path in paths[:2]] == ["fast", "slower"]
    assert [path.gigabytes_per_second for path in paths[2:]] == [0, 0, 0]
    warnings = {path.name: path.warning for path in paths}
    assert not warnings["fast"]
    assert warnings["broken"] == "broken does not work here: the cable is cut"
    assert warnings["forgetful"] == "forgetful does not work here: other bytes came than were read"
    assert warnings["hanging"].startswith("hanging does not work here: it moved too little within")


async def test_a_slow_path_gets_a_warning() -> None:
    memory = arena(2, SLOT)
    seconds = SLOT / SLOW_GIGABYTES_PER_SECOND / 1e9 * 20
    (path,) = await self_test([Copy(memory, "slow", seconds)], memory, "127.0.0.1:1")
    assert 0 < path.gigabytes_per_second < SLOW_GIGABYTES_PER_SECOND
    assert path.warning.startswith("slow is slow here")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_each_transport_passes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if why := missing(name):
        pytest.skip(why)
    memory = arena(SLOTS, SLOT)
    async with TRANSPORTS[name](memory) as (transport, address):
        (path,) = await self_test([transport], memory, address)
    assert path.gigabytes_per_second > 0, path.warning
