"""The self-test of transports: it measures those that work, names those that fail, and never hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.fast_transports import SLOW_GIGABYTES_PER_SECOND, self_test
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source
from tests.services.kvtransfer.transport_cases import TRANSPORTS, arena, missing

SLOT, SLOTS = 1 << 16, 8


class Copy:
    """A transport that copies within one arena."""

    name = "copy"

    def __init__(self, memory: ArenaMemory, seconds: float = 0.0) -> None:
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


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Broken, "the cable is cut"),
        (Forgetful, "other bytes came than were read"),
        (Hanging, "it moved too little within"),
    ],
)
async def test_what_fails_moves_nothing_and_the_log_says_why(
    kind: type[Copy], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = arena(SLOTS, SLOT)
    assert await asyncio.wait_for(self_test(kind(memory), memory, "127.0.0.1:1", limit_seconds=0.2), 30) == 0
    assert f"copy does not work here: {reason}" in caplog.text


async def test_a_slow_path_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    memory = arena(2, SLOT)
    seconds = SLOT / SLOW_GIGABYTES_PER_SECOND / 1e9 * 20
    assert 0 < await self_test(Copy(memory, seconds), memory, "127.0.0.1:1") < SLOW_GIGABYTES_PER_SECOND
    assert "copy is slow here" in caplog.text


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_each_transport_passes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if why := missing(name):
        pytest.skip(why)
    memory = arena(SLOTS, SLOT)
    async with TRANSPORTS[name](memory) as (transport, address):
        assert await self_test(transport, memory, address) > 0, caplog.text
