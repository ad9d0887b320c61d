"""Two gateways and one batch: one stalls before a call of the store, and the other takes the batch over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from paceline.services.gateway.api.batches import batch_run
from paceline.services.gateway.api.batches.batch import Batch
from paceline.services.gateway.api.batches.batch_run import BatchLimits, BatchRun
from paceline.services.gateway.api.batches.batch_store import BatchStore, LeaseLostError
from paceline.services.gateway.api.batches.file_store import File, FileStore
from paceline.services.gateway.api.batches.lines import Line, LineReply
from paceline.services.gateway.api.batches.pressure import LineGate, LinePlaces
from paceline.services.gateway.store.database import Execute, open_database
from paceline.services.gateway.store.store import Store

T = TypeVar("T")
LATER, PAST, NEVER = 1e12, 1.0, 1_000_000
LINES = [json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": {}}) for n in range(1, 6)]
INPUT = File("file-in", "me", "batch", "in.jsonl", 0, 0.0, LATER)


class StallingStore(Store):
    """A store whose call number `at` waits until `go_on` is set."""

    at = NEVER

    def __init__(self, path: Path) -> None:
        super().__init__(open_database(str(path)))
        self.calls = 0
        self.stalls, self.go_on = asyncio.Event(), asyncio.Event()

    async def run(self, work: Callable[[Execute], T], *, writes: bool = True) -> T:
        self.calls += 1
        if self.calls == self.at:
            self.stalls.set()
            await self.go_on.wait()
        return await super().run(work, writes=writes)


class Gateway(NamedTuple):
    """What a gateway has of its batches."""

    name: str
    store: StallingStore
    batches: BatchStore
    files: FileStore

    async def work(self, places: int = 9, max_answer_bytes: int = NEVER) -> None:
        """Claim the batch and run it. Another gateway may have taken or completed it meanwhile."""
        gate = LineGate(lambda: True, lambda: LinePlaces(places, places), lambda: 0, lambda: 0, time.monotonic)
        limits = BatchLimits(100, 10_000, 3600.0, max_answer_bytes=max_answer_bytes)
        for claimed in await self.batches.claim(self.name, LATER, 1, 1, []):
            run = BatchRun(
                claimed,
                self.batches,
                self.files,
                name=self.name,
                limits=limits,
                gates=[gate],
                gate_of=lambda line: gate,
                call=self.answer,
            )
            with contextlib.suppress(LeaseLostError, BaseExceptionGroup):
                await run.run()

    async def answer(self, endpoint: str, line: Line, owner: str) -> LineReply:
        # Gateways give different answers, so that a file with lines of both would be noticed if it had one line twice.
        return LineReply(400 if line.number == 2 else 200, self.name, json.dumps({"by": self.name}))

    async def lose_lease(self) -> None:
        """Let the lease end, as it does if the gateway stalls for longer than it lasts."""
        await self.batches.renew(self.name, PAST, [BATCH.id])


BATCH = Batch(
    id="batch_1",
    owner="me",
    endpoint="/v1/completions",
    input_file_id=INPUT.id,
    completion_window="24h",
    created=0.0,
    expires=LATER,
)


@pytest.fixture
async def open_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Gateway]]:
    """Return a function that opens a gateway on a fresh copy of a store with one batch, or on the last copy."""
    monkeypatch.setattr(batch_run, "CHUNK_BYTES", 100)  # so that each file has several writes
    opened: list[Gateway] = []
    copies = 0

    def open_(name: str, path: Path) -> Gateway:
        store = StallingStore(path)
        files = FileStore(store, entries=9, max_bytes=100_000)
        opened.append(Gateway(name, store, BatchStore(store, most=9, seconds=3600.0), files))
        return opened[-1]

    def close() -> None:
        while opened:
            opened.pop().store.close()

    first = open_("first", tmp_path / "template.db")
    await first.files.begin(INPUT)
    await first.files.append(INPUT, 0, "".join(f"{line}\n" for line in LINES).encode())
    await first.files.finish(INPUT)
    await first.batches.add(BATCH, first.files.hold(INPUT.id, LATER))
    close()

    def open_next(name: str, *, is_fresh: bool = False) -> Gateway:
        nonlocal copies
        if is_fresh:
            close()
            copies += 1
            shutil.copy(tmp_path / "template.db", tmp_path / f"{copies}.db")
        return open_(name, tmp_path / f"{copies}.db")

    yield open_next
    close()


async def check_answers(gateway: Gateway) -> None:
    """Demand that the batch is completed and each line is answered once, in its file."""
    batch = await gateway.batches.get(BATCH.id, "me")
    assert batch is not None
    assert (batch.status, batch.completed, batch.failed) == ("completed", 4, 1)
    for file_id, ids in ((batch.output_file_id, ["1", "3", "4", "5"]), (batch.error_file_id, ["2"])):
        assert file_id is not None
        file = await gateway.files.get(file_id, "me")
        assert file is not None
        data = b"".join([chunk async for chunk in gateway.files.content(file_id)])
        assert [json.loads(line)["custom_id"] for line in data.splitlines()] == ids
        assert file.size == len(data)


async def calls_of_a_whole_run(open_gateway: Callable[..., Gateway]) -> int:
    alone = open_gateway("a", is_fresh=True)
    await alone.work()
    calls = alone.store.calls
    await check_answers(alone)
    return calls


async def stall(gateway: Gateway, at: int) -> asyncio.Task[None]:
    """Let a gateway work until its call `at`, and end its lease while it stalls there."""
    gateway.store.at = at
    task = asyncio.create_task(gateway.work())
    stalls = asyncio.create_task(gateway.store.stalls.wait())
    await asyncio.wait([task, stalls], return_when=asyncio.FIRST_COMPLETED)
    stalls.cancel()
    gateway.store.calls = NEVER + 1
    if not task.done():
        await gateway.lose_lease()
    return task


async def test_lines_are_refused_when_the_answers_of_their_batch_are_too_large(
    open_gateway: Callable[..., Gateway],
) -> None:
    gateway = open_gateway("a", is_fresh=True)
    await gateway.work(places=1, max_answer_bytes=400)
    batch = await gateway.batches.get(BATCH.id, "me")
    assert batch is not None
    assert batch.status == "completed"
    assert batch.completed in (2, 3)
    assert batch.error_file_id is not None
    errors = b"".join([chunk async for chunk in gateway.files.content(batch.error_file_id)]).splitlines()
    assert len(errors) == batch.failed == 5 - batch.completed
    told = json.loads(errors[-1])
    assert (told["custom_id"], told["error"]["code"]) == ("5", "answers_too_large")
    assert "--stored-files-size" in told["error"]["message"]


async def test_a_gateway_that_stalls_anywhere_leaves_the_answers_of_its_successor(
    open_gateway: Callable[..., Gateway],
) -> None:
    for at in range(2, await calls_of_a_whole_run(open_gateway) + 1):
        one, other = open_gateway("a", is_fresh=True), open_gateway("b")
        task = await stall(one, at)
        await other.work()
        await check_answers(other)
        one.store.go_on.set()
        await task
        await check_answers(other)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.thorough)])
async def test_two_gateways_that_stall_in_turn_leave_whole_answers(
    open_gateway: Callable[..., Gateway], step: int
) -> None:
    """The successor stalls, too, so the first one goes on while the second has written a part of the files."""
    calls = await calls_of_a_whole_run(open_gateway)
    for at in range(2, calls + 1, step):
        for ahead in range(2, calls + 2 - at // 2, step):
            one, other, last = open_gateway("a", is_fresh=True), open_gateway("b"), open_gateway("c")
            first = await stall(one, at)
            second = await stall(other, ahead)
            one.store.go_on.set()
            await first
            await last.work()
            other.store.go_on.set()
            await second
            await check_answers(last)
