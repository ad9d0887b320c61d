"""Batches and the answers to their lines, in the SQL database.

One gateway at a time runs a batch. The gateway holds a lease, which it renews, and writes answers and files of answers
only in transactions that check the lease. If the gateway ends or stalls, another one goes on with the lines that have
no answer. Each line gets one answer: the primary key (batch, line) allows no second one.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.batches.batch import ACTIVE, Batch, LineError
from paceline.services.gateway.api.batches.file_store import QuotaError
from paceline.services.gateway.api.batches.pages import Order, ordered, read_page
from paceline.services.gateway.store.database import Database, Execute
from paceline.services.gateway.store.store import Check, Store, Tables

PAGE_LINES, PAGE_BYTES = 200, 4 << 20
"""Largest number of answers that one query reads, and of their bytes, unless a single one has more."""

MESSAGE_BATCH = "msgbatch"
"""Prefix of the ids of message batches. No other batch has this prefix."""
_COUNTED = ("id", "owner", "status", "total", "completed", "failed", "created", "expires")
"""Fields of a batch that have a column of their own. The other fields are JSON in the column `rest`."""
_COLUMNS = ", ".join((*_COUNTED, "rest"))
_IS_ACTIVE = f"status IN ({', '.join(repr(status) for status in ACTIVE)})"


class LeaseLostError(Exception):
    """Another gateway has the batch's lease, or the batch was deleted."""


class InUseError(InvalidRequestError):
    """A batch that has not ended reads the file."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line of a batch."""

    number: int
    text: str
    """The text of the answer's line in the file of answers or errors."""
    is_ok: bool


class BatchStore:
    """Keeps batches by id. All methods raise StoreError if the database cannot be used.

    Args:
        most: the largest number of active batches of one owner.
        seconds: time for which a batch is kept after its end.
    """

    def __init__(self, store: Store, *, most: int, seconds: float) -> None:
        self._store = store
        store.add_tables(_TABLES)
        self._most = most
        self._seconds = seconds

    async def add(self, batch: Batch, hold: Check) -> Batch:
        """Add a batch and return it. If an earlier try of the same request has added one, return that batch instead.

        Args:
            hold: checks that the input file exists, and locks it until the batch is added.

        Raises QuotaError if the owner has `most` active batches already, and the error of `hold`.
        """

        def add(execute: Execute) -> Batch:
            hold(execute)
            if (known := _get(execute, batch.id)) is not None:
                return known
            query = f"SELECT COUNT(*) FROM paceline_batches WHERE owner = :owner AND {_IS_ACTIVE}"
            ((count,),), _ = execute(query, {"owner": batch.owner})
            if count >= self._most:
                message = f"{count} batches of this key have not ended, as many as it may have (--max-batches)"
                raise QuotaError(message)
            values = ", ".join(f":{name}" for name in (*_COUNTED, "rest"))
            execute(
                f"INSERT INTO paceline_batches ({_COLUMNS}, runner, runner_until, kept_until) "
                f"VALUES ({values}, '', 0, :kept_until)",
                self._fields(batch),
            )
            return batch

        return await self._store.run(add)

    async def delete_expired(self) -> None:
        """Delete the batches that ended longer ago than batches are kept."""
        statement = f"DELETE FROM paceline_batches WHERE kept_until < :now AND NOT {_IS_ACTIVE}"
        await self._store.run(lambda execute: execute(statement, {"now": time.time()}))

    async def get(self, batch_id: str, owner: str | None) -> Batch | None:
        """Return the batch with an id; None if there is none that belongs to the owner. Owner None allows any."""
        batch = await self._store.run(lambda execute: _get(execute, batch_id), writes=False)
        return batch if batch is not None and owner in (None, batch.owner) else None

    async def page(
        self, owner: str | None, after: Batch | None, limit: int, order: Order = "desc", *, of_messages: bool = False
    ) -> list[Batch]:
        """Return at most `limit` batches in order of creation. Arguments are those of `FileStore.page`.

        Args:
            of_messages: whether to return only message batches; otherwise only the others.
        """
        kind = f"id {'' if of_messages else 'NOT '}LIKE '{MESSAGE_BATCH}%'"
        query = f"SELECT {_COLUMNS} FROM paceline_batches WHERE kept_until >= :now AND {kind}"
        return [_batch(row) for row in await read_page(self._store, query, {"owner": owner}, after, limit, order)]

    def unused(self, file_id: str) -> Check:
        """Return a check that no active batch reads a file. It raises InUseError."""

        def check(execute: Execute) -> None:
            if (user := inputs(execute).get(file_id)) is not None:
                message = f"the batch {user!r} still reads this file; cancel the batch first"
                raise InUseError(message, "file_id")

        return check

    async def change(self, batch_id: str, change: Callable[[Batch], Batch], runner: str | None = None) -> Batch:
        """Change a batch in the store and return the changed batch.

        Args:
            change: returns the changed batch. If it raises an exception, the batch stays as it was.
            runner: the gateway that must have the lease; None if the change needs no lease.

        Raises LeaseLostError if there is no such batch, or another gateway has its lease.
        """

        def work(execute: Execute) -> Batch:
            # This locks the row, so that no other gateway changes it between the read and the write.
            where = "id = :id" if runner is None else "id = :id AND runner = :runner"
            fields = {"id": batch_id, "runner": runner} if runner is not None else {"id": batch_id}
            changed = execute(f"UPDATE paceline_batches SET runner = runner WHERE {where}", fields)[1]
            batch = _get(execute, batch_id)
            if not changed or batch is None:
                raise LeaseLostError(batch_id)
            batch = change(batch)
            columns = ", ".join(f"{name} = :{name}" for name in (*_COUNTED[2:], "rest", "kept_until"))
            execute(f"UPDATE paceline_batches SET {columns} WHERE id = :id", self._fields(batch))
            if not batch.is_active:
                execute("DELETE FROM paceline_batch_lines WHERE batch_id = :id", {"id": batch_id})
            return batch

        return await self._store.run(work)

    async def delete(self, batch_id: str) -> None:
        """Delete a batch that has ended, if there is one."""
        statement = f"DELETE FROM paceline_batches WHERE id = :id AND NOT {_IS_ACTIVE}"
        await self._store.run(lambda execute: execute(statement, {"id": batch_id}))

    # ---- leases

    async def claim(
        self, runner: str, until: float, most: int, most_of_owner: int, running: Collection[str]
    ) -> list[Batch]:
        """Take the leases of up to `most` active batches that no living gateway runs. Owners take turns, oldest first.

        Batches whose lease this gateway has but that are not in `running` are taken, too: the answer to an earlier
        call was lost.

        Args:
            runner: name of this gateway.
            until: end of the lease, in seconds since the epoch.
            most_of_owner: largest number of batches of one owner that this gateway may have afterwards.
            running: ids of the batches that this gateway runs.
        """
        free = f"{_IS_ACTIVE} AND (runner IN ('', :runner) OR runner_until < :now)"

        def claim(execute: Execute) -> list[Batch]:
            fields = {"runner": runner, "now": time.time()}
            rows, _ = execute(f"SELECT {_COLUMNS} FROM paceline_batches WHERE {free} {ordered('asc')}", fields)
            batches = [_batch(row) for row in rows]
            held = Counter(batch.owner for batch in batches if batch.id in running)
            claimed = []
            for batch in _in_turns([each for each in batches if each.id not in running], held, most_of_owner)[:most]:
                statement = (
                    f"UPDATE paceline_batches SET runner = :runner, runner_until = :until WHERE id = :id AND {free}"
                )
                if execute(statement, {**fields, "id": batch.id, "until": until})[1]:
                    claimed.append(batch)
            return claimed

        return await self._store.run(claim)

    async def renew(self, runner: str, until: float, running: Collection[str]) -> dict[str, Batch]:
        """Renew the leases of the batches that a gateway runs. Return the batches whose lease it still has, by id."""

        def renew(execute: Execute) -> dict[str, Batch]:
            own = f"runner = :runner AND {_IS_ACTIVE}"
            statement = f"UPDATE paceline_batches SET runner_until = :until WHERE id = :id AND {own}"
            for batch_id in sorted(running):  # in one order, so that no two transactions wait for each other
                execute(statement, {"runner": runner, "until": until, "id": batch_id})
            rows, _ = execute(f"SELECT {_COLUMNS} FROM paceline_batches WHERE {own}", {"runner": runner})
            return {batch.id: batch for batch in map(_batch, rows) if batch.id in running}

        return await self._store.run(renew)

    def lease(self, batch_id: str, runner: str) -> Check:
        """Return a check that a gateway has the lease of an active batch. It raises LeaseLostError.

        The check locks the batch's row, so that no other gateway takes the lease before the transaction ends.
        """
        statement = f"UPDATE paceline_batches SET runner = runner WHERE id = :id AND runner = :runner AND {_IS_ACTIVE}"

        def check(execute: Execute) -> None:
            if not execute(statement, {"id": batch_id, "runner": runner})[1]:
                raise LeaseLostError(batch_id)

        return check

    async def release(self, batch_id: str, runner: str) -> None:
        """Give a batch's lease back, so that any gateway may take it at once."""
        statement = "UPDATE paceline_batches SET runner = '' WHERE id = :id AND runner = :runner"
        await self._store.run(lambda execute: execute(statement, {"id": batch_id, "runner": runner}))

    # ---- answers

    async def answer(self, batch_id: str, runner: str, answers: Sequence[LineAnswer]) -> None:
        """Write answers to lines that have no answer yet. Raises LeaseLostError if another gateway has the lease."""
        ok = sum(answer.is_ok for answer in answers)

        def work(execute: Execute) -> None:
            counted = "completed = completed + :ok, failed = failed + :bad"
            statement = f"UPDATE paceline_batches SET {counted} WHERE id = :id AND runner = :runner AND {_IS_ACTIVE}"
            fields = {"id": batch_id, "runner": runner, "ok": ok, "bad": len(answers) - ok}
            if not execute(statement, fields)[1]:
                raise LeaseLostError(batch_id)
            for answer in answers:
                execute(
                    "INSERT INTO paceline_batch_lines (batch_id, number, is_ok, text) "
                    "VALUES (:id, :number, :is_ok, :text)",
                    {"id": batch_id, "number": answer.number, "is_ok": int(answer.is_ok), "text": answer.text},
                )

        await self._store.run(work)

    async def answered(self, batch_id: str) -> set[int]:
        """Return the numbers of a batch's lines that have an answer."""
        query = "SELECT number FROM paceline_batch_lines WHERE batch_id = :id"
        rows, _ = await self._store.run(lambda execute: execute(query, {"id": batch_id}), writes=False)
        return {row[0] for row in rows}

    async def answers(self, batch_id: str, is_ok: bool) -> AsyncIterator[str]:
        """Yield the text of a batch's good answers, or of its errors, in the order of their lines."""
        own = "FROM paceline_batch_lines WHERE batch_id = :id AND is_ok = :is_ok AND number > :after"
        sizes_query = f"SELECT number, LENGTH(text) {own} ORDER BY number LIMIT :limit"
        texts_query = f"SELECT text {own} AND number <= :last ORDER BY number"
        fields: dict[str, Any] = {"id": batch_id, "is_ok": int(is_ok), "after": 0}
        while sizes := await self._page(sizes_query, {**fields, "limit": PAGE_LINES}):
            for last in _page_ends(sizes):
                for (text,) in await self._page(texts_query, {**fields, "last": last}):
                    yield text
                fields["after"] = last

    async def answer_bytes(self, batch_id: str) -> int:
        """Return the size of all answers to a batch's lines, in characters."""
        query = "SELECT COALESCE(SUM(LENGTH(text)), 0) FROM paceline_batch_lines WHERE batch_id = :id"
        ((size,),) = await self._page(query, {"id": batch_id})
        return int(size)

    async def _page(self, query: str, fields: dict[str, Any]) -> list[tuple[Any, ...]]:
        return (await self._store.run(lambda execute: execute(query, fields), writes=False))[0]

    def _fields(self, batch: Batch) -> dict[str, Any]:
        """Return the values of a batch's columns, by column."""
        values = dataclasses.asdict(batch)
        counted = {name: values.pop(name) for name in _COUNTED}
        # An active batch is never deleted, because it ends with its window.
        kept_until = (batch.expires if batch.is_active else time.time()) + self._seconds
        return {**counted, "rest": json.dumps(values), "kept_until": kept_until}


def _in_turns(batches: Sequence[Batch], held: Mapping[str, int], most_of_owner: int) -> list[Batch]:
    """Order batches such that owners take turns, each with its oldest batches first.

    Args:
        batches: in order of creation, the oldest first.
        held: number of batches of each owner that the gateway has already, which count as turns.
        most_of_owner: largest number of batches of one owner, including those that are held.
    """
    turns = Counter(held)
    found = []
    for batch in batches:
        turns[batch.owner] += 1
        if turns[batch.owner] <= most_of_owner:
            found.append((turns[batch.owner], batch))
    return [batch for _, batch in sorted(found, key=lambda pair: pair[0])]


def inputs(execute: Execute) -> dict[str, str]:
    """Return the input files of active batches: the id of a batch by the id of its file."""
    rows, _ = execute(f"SELECT {_COLUMNS} FROM paceline_batches WHERE {_IS_ACTIVE}")
    return {batch.input_file_id: batch.id for batch in map(_batch, rows)}


def _get(execute: Execute, batch_id: str) -> Batch | None:
    rows, _ = execute(f"SELECT {_COLUMNS} FROM paceline_batches WHERE id = :id", {"id": batch_id})
    return _batch(rows[0]) if rows else None


def _batch(row: Sequence[Any]) -> Batch:
    *counted, rest = row
    values = json.loads(rest)
    values["errors"] = tuple(LineError(**error) for error in values["errors"])
    return Batch(**dict(zip(_COUNTED, counted, strict=True)), **values)


def _statements(database: Database) -> list[str]:
    return [
        "CREATE TABLE paceline_batches (id VARCHAR(64) PRIMARY KEY, owner VARCHAR(64) NOT NULL, "
        "status VARCHAR(16) NOT NULL, total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, "
        f"created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION NOT NULL, rest {database.text} NOT NULL, "
        "runner VARCHAR(128) NOT NULL, runner_until DOUBLE PRECISION NOT NULL, kept_until DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX paceline_batches_owner ON paceline_batches (owner, created)",
        "CREATE INDEX paceline_batches_status ON paceline_batches (status)",
        "CREATE TABLE paceline_batch_lines (batch_id VARCHAR(64) NOT NULL, number INTEGER NOT NULL, "
        f"is_ok INTEGER NOT NULL, text {database.text} NOT NULL, PRIMARY KEY (batch_id, number))",
    ]


_TABLES = Tables(["paceline_batches", "paceline_batch_lines"], _statements)


def _page_ends(sizes: Sequence[tuple[Any, ...]]) -> Iterator[int]:
    """Yield the number of the last answer of each page, from the number and the size of each answer, in order."""
    page = 0
    for (number, size), (_, following) in zip(sizes, [*sizes[1:], (0, PAGE_BYTES + 1)], strict=True):
        page += size
        if page + following > PAGE_BYTES:
            yield number
            page = 0
