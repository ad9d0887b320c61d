"""Runs one batch, from its validation to its files of answers, or from the state in which another gateway left it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.api.batches.batch import Batch, LineError, Status
from paceline.services.gateway.api.batches.batch_store import BatchStore, LineAnswer
from paceline.services.gateway.api.batches.file_store import CHUNK_BYTES, File, FileStore
from paceline.services.gateway.api.batches.lines import (
    InputCheck,
    Line,
    LineReply,
    answer_line,
    error_line,
    read_line,
    split_lines,
)
from paceline.services.gateway.api.batches.pressure import LineGate, RefusedLines
from paceline.services.gateway.http.bounds import Bounds
from paceline.services.gateway.http.reading import SMALL_BYTES

RETRIES = 20
"""Largest number of retries of a line after failures of the server. A line that makes workers crash must end."""
RETRY_SECONDS = (0.25, 30.0)
"""Shortest and longest mean wait before a retry, in seconds. The mean doubles with each failure."""
GATE_SECONDS = 0.25
"""Time between two looks at a gate that is shut, in seconds."""
OK, BUSY, SERVER_ERROR = 200, 429, 500
"""HTTP statuses: of good answers; of lines for which there is no room; the lowest status of the server's failures."""
FULL = (
    "answers_too_large",
    "The answers to other lines have as many bytes as all files of a key may have (--stored-files-size). Send this "
    "line in another batch, after you have deleted files.",
)
"""Code and message of the error for lines for whose answers a batch has no room."""
EXPIRED = "batch_expired", "This line was not answered before the completion window ended."
"""Code and message of the error for lines that had no answer when the window ended."""

T = TypeVar("T", tuple[int, bytes], str)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of batches."""

    max_lines: int
    max_line_bytes: int
    file_seconds: float
    """Seconds for which files of answers are kept, unless the batch sets another time."""
    bounds: Bounds | None = None
    """Limits on the JSON of a line; None is no limit."""
    max_answer_bytes: int = sys.maxsize
    """Size of the answers of a batch after which its other lines are refused. A line that asks for two thousand vectors
    is a thousand times smaller than its answer."""


class BatchRun:
    """A batch that this gateway runs.

    Args:
        name: name of this gateway, which has the batch's lease.
        gates: the gates of all models.
        gate_of: returns the gate at which a line waits until it may run.
        call: sends a line to the application and returns the reply.
    """

    def __init__(
        self,
        batch: Batch,
        batches: BatchStore,
        files: FileStore,
        *,
        name: str,
        limits: BatchLimits,
        gates: Collection[LineGate],
        gate_of: Callable[[Line], LineGate],
        call: Callable[[str, Line, str], Coroutine[Any, Any, LineReply]],
    ) -> None:
        self.batch = batch
        self.is_cancelled = asyncio.Event()
        """Set if a client has cancelled the batch."""
        self._batches = batches
        self._files = files
        self._name = name
        self._limits = limits
        self._gates = gates
        self._gate_of = gate_of
        self._call = call
        self._refused = RefusedLines()
        self._answer_bytes = 0
        """Size of all answers so far."""

    async def run(self) -> None:
        """Run the batch to its end. Raises LeaseLostError if another gateway has taken it over, and StoreError."""
        if self.batch.status == "validating":
            await self._validate()
        if self.batch.status == "in_progress":
            await self._answer_lines()
        if self.batch.status in ("finalizing", "cancelling"):
            await self._finalize()
        log.info("batch %s: %s, %d lines", self.batch.id, self.batch.status, self.batch.total)

    # ---- validation

    async def _validate(self) -> None:
        check = InputCheck(
            self.batch.endpoint, self._limits.max_lines, self._limits.max_line_bytes, self._limits.bounds
        )
        if await self._files.get(self.batch.input_file_id, self.batch.owner) is None:
            check.errors.append(LineError("file_not_found", "the input file was deleted", param="input_file_id"))
        else:
            async for lines in _grouped(self._lines(), CHUNK_BYTES):
                await asyncio.to_thread(_add_all, check, lines)
                if check.is_over or self.is_cancelled.is_set():
                    break
            check.finish()
        now = time.time()
        if check.errors:
            await self._change(lambda batch: batch.moved("failed", now, errors=tuple(check.errors)))
        else:
            await self._change(lambda batch: batch.moved("in_progress", now, total=check.count))

    def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        return split_lines(self._files.content(self.batch.input_file_id), self._limits.max_line_bytes)

    # ---- lines

    async def _answer_lines(self) -> None:
        """Answer the lines that have no answer, until the window ends or a client cancels the batch."""
        work = asyncio.create_task(self._answer_all())
        cancelled = asyncio.create_task(self.is_cancelled.wait())
        try:
            left = max(0.0, self.batch.expires - time.time())
            await asyncio.wait((work, cancelled), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await end_tasks(work, cancelled)
        await self._change(_at_end_of_lines)

    async def _answer_all(self) -> None:
        """Answer all lines that have no answer. Lines whose model has no workers wait until it has some."""
        begun = await self._batches.answered(self.batch.id)
        self._answer_bytes = await self._batches.answer_bytes(self.batch.id)
        async with asyncio.TaskGroup() as group:
            while shut := await self._begin_lines(group, begun):
                await _until_one_opens(shut)

    async def _begin_lines(self, group: asyncio.TaskGroup, begun: set[int]) -> set[LineGate]:
        """Begin lines in their order, each after the one before runs, and add their numbers to `begun`.

        Returns the shut gates, for whose lines this must be called again. If all gates are shut, stops reading lines.
        """
        shut: set[LineGate] = set()
        async for number, data in self._lines():
            if number in begun:
                continue
            await self._refused.wait_for_none()
            is_small = len(data) <= SMALL_BYTES
            line = self._read(number, data) if is_small else await asyncio.to_thread(self._read, number, data)
            if (gate := self._gate_of(line)).is_shut:
                shut.add(gate)
                if all(each.is_shut for each in self._gates):
                    return {*self._gates}
                continue
            begun.add(number)
            has_begun = asyncio.Event()
            group.create_task(self._answer(line, gate, has_begun))
            # If the gate shuts meanwhile, this line waits there, and lines of other models go on.
            while not has_begun.is_set() and not gate.is_shut:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GATE_SECONDS):
                        await has_begun.wait()
        return shut

    def _read(self, number: int, data: bytes) -> Line:
        return read_line(number, data, [self.batch.endpoint], self._limits.max_line_bytes, self._limits.bounds)

    async def _answer(self, line: Line, gate: LineGate, has_begun: asyncio.Event) -> None:
        """Answer a line. Retry it after passing failures of the server, and while there is no room for it."""
        failures = 0
        while True:
            if self._answer_bytes >= self._limits.max_answer_bytes:
                has_begun.set()
                own = LineAnswer(line.number, error_line(line.custom_id, *FULL), is_ok=False)
                break
            answer = await gate.run(
                lambda: self._call(self.batch.endpoint, line, self.batch.owner),
                first=has_begun.is_set(),
                on_enter=has_begun.set,
            )
            if answer is None:
                continue
            if answer.is_over_limit:
                await self._refused.wait(line.number, answer.retry_after)
                continue
            self._refused.note_end(line.number)
            if answer.status == BUSY:
                gate.note_busy()
            elif answer.status < SERVER_ERROR or failures == RETRIES:
                own = LineAnswer(line.number, answer_line(line.custom_id, answer), answer.status == OK)
                break
            else:
                failures += 1
            shortest, longest = RETRY_SECONDS
            await asyncio.sleep(min(shortest * 2**failures, longest) * random.uniform(0.5, 1.5))
        self._answer_bytes += len(own.text)
        await self._batches.answer(self.batch.id, self._name, [own])

    # ---- the end

    async def _finalize(self) -> None:
        """Write the files of answers. Lines without an answer get an error if the window is over."""
        if self.batch.is_expired:
            await self._refuse_the_rest()
        output = await self._write("output", is_ok=True)
        errors = await self._write("errors", is_ok=False)
        end: Status = "cancelled" if self.batch.status == "cancelling" else "completed"
        if self.batch.is_expired:
            end = "expired"
        await self._change(
            lambda batch: batch.moved(end, time.time(), output_file_id=output, error_file_id=errors), is_last=True
        )

    async def _refuse_the_rest(self) -> None:
        done = await self._batches.answered(self.batch.id)
        async for lines in _grouped(self._lines(), CHUNK_BYTES):
            refused = await asyncio.to_thread(self._refusals, [line for line in lines if line[0] not in done])
            if refused:
                await self._batches.answer(self.batch.id, self._name, refused)

    def _refusals(self, lines: Iterable[tuple[int, bytes]]) -> list[LineAnswer]:
        """Return error answers for lines that were not answered before the window ended."""
        return [
            LineAnswer(number, error_line(self._read(number, data).custom_id, *EXPIRED), is_ok=False)
            for number, data in lines
        ]

    async def _write(self, kind: str, *, is_ok: bool) -> str | None:
        """Write the file of good answers or of errors, and return its id; None if there are no such answers.

        The id follows from the batch, so a gateway that takes the batch over replaces the file. Each write checks the
        lease, so a gateway that has lost the lease cannot change its successor's file.
        """
        seconds, now = self.batch.output_seconds or self._limits.file_seconds, time.time()
        name = f"{self.batch.id}_{kind}.jsonl"
        file_id = f"file-{uuid.uuid5(uuid.NAMESPACE_OID, name).hex}"
        file = File(file_id, self.batch.owner, "batch_output", name, 0, now, now + seconds)
        lease = self._batches.lease(self.batch.id, self._name)
        number = 0
        async for texts in _grouped(self._batches.answers(self.batch.id, is_ok), CHUNK_BYTES):
            if number == 0:
                await self._files.begin(file, lease)
            data = "".join(f"{text}\n" for text in texts).encode()
            await self._files.append(file, number, data, lease)
            number += 1
        return (await self._files.finish(file, lease)).id if number else None

    async def _change(self, change: Callable[[Batch], Batch], is_last: bool = False) -> None:
        """Change the batch in the store. If a client has cancelled the batch, apply nothing but its last change."""

        def unless_cancelled(batch: Batch) -> Batch:
            return batch if batch.status == "cancelling" and not is_last else change(batch)

        self.batch = await self._batches.change(self.batch.id, unless_cancelled, self._name)


def _at_end_of_lines(batch: Batch) -> Batch:
    left = batch.total - batch.completed - batch.failed
    return batch.moved("finalizing", time.time(), is_expired=left > 0, unanswered=left)


async def _until_one_opens(gates: Iterable[LineGate]) -> None:
    while True:
        if any(not gate.is_shut for gate in gates):
            return
        await asyncio.sleep(GATE_SECONDS)


async def _grouped(items: AsyncIterator[T], size: int) -> AsyncIterator[list[T]]:
    """Yield lists of consecutive items, each of about `size` bytes or characters in all."""
    group: list[T] = []
    length = 0
    async for item in items:
        group.append(item)
        length += len(item if isinstance(item, str) else item[1])
        if length >= size:
            yield group
            group, length = [], 0
    if group:
        yield group


def _add_all(check: InputCheck, lines: Iterable[tuple[int, bytes]]) -> None:
    for number, data in lines:
        if check.is_over:
            return
        check.add(number, data)
