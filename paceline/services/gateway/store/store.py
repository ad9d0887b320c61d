"""One database, its tables, and the thread that uses it."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.services.gateway.http.access.callers import current_owner
from paceline.services.gateway.http.pool import FairPool
from paceline.services.gateway.store.database import ANSWER_SECONDS, ConflictError, Database, Execute, StoreError

T = TypeVar("T")

CONFLICT_SECONDS = (0.02, 0.1, 0.5)
"""Mean pauses, in seconds, before a transaction that conflicted with another one runs again."""

Check = Callable[[Execute], None]
"""A condition of a write, which is looked at in the transaction of this write. Raises an error if it does not hold."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables that belong together. They are created when they are first needed."""

    names: Sequence[str]
    statements: Callable[[Database], Sequence[str]]
    """Returns the statements that create them, in the types of a database. Each has an effect of its own."""


class Store:
    """A database that all parts of a gateway use, one after another.

    Args:
        database: is closed with the store.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._missing: list[Tables] = []
        # One thread, because a connection serves one thread at a time. Owners take turns, because to read a long
        # conversation may take a second.
        self._pool = FairPool(1, "store")

    def add_tables(self, tables: Tables) -> None:
        """Have tables created before the next work, unless they exist."""
        self._missing.append(tables)

    async def run(self, work: Callable[[Execute], T], *, writes: bool = True) -> T:
        """Run `work` in one transaction and return its result. Raises StoreError and the errors of `work`.

        If the caller is told of a failure, or does not wait any more, the work takes no effect, except if its COMMIT
        has begun by then.

        Args:
            work: may run more than once, if its transaction was undone.
            writes: whether the work may change something.
        """
        given_up = threading.Event()

        def run() -> T:
            try:
                while self._missing:
                    _make_tables(self._database, self._missing[0])
                    del self._missing[0]
                return _run_again(lambda: self._run(work, writes, given_up))
            except StoreError as error:
                if error.reason:
                    log.error("the store cannot be used (%s); see --store", error.reason)
                raise

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._pool.run(current_owner(), run)
        except TimeoutError:
            log.error("the store has not answered for %g seconds; see --store", ANSWER_SECONDS)
            raise StoreError from None
        finally:
            given_up.set()

    def _run(self, work: Callable[[Execute], T], writes: bool, given_up: threading.Event) -> T:
        with self._database.transaction(writes=writes) as execute:
            result = work(execute)
            if given_up.is_set():  # the client tries again, and must not find two of what it asked for
                raise StoreError
            return result

    def close(self) -> None:
        """Wait for what is being written, and close the database."""
        self._pool.close(self._database.close)


def _run_again(run: Callable[[], T]) -> T:
    """Run a transaction, and again if it stood in another one's way. Raises ConflictError if that does not help."""
    for seconds in CONFLICT_SECONDS:
        try:
            return run()
        except ConflictError:
            time.sleep(seconds * random.uniform(0.5, 1.5))
    return run()


def _make_tables(database: Database, tables: Tables) -> None:
    """Create tables, unless they exist. SQL has no common statement for that.

    Another gateway may do the same now, or may have ended half-way. So each statement has a transaction of its own,
    its failure does not matter, and in the end all tables must exist.

    Raises StoreError, at once if the database does not answer.
    """
    with database.transaction(writes=False) as execute:
        execute("SELECT 1")
    if _exist(database, tables):
        return
    reason = ""
    for statement in tables.statements(database):
        try:
            with database.transaction() as execute:
                execute(statement)
        except StoreError as error:
            reason = reason or error.reason
    if not _exist(database, tables):
        raise StoreError(reason=reason)


def _exist(database: Database, tables: Tables) -> bool:
    try:
        with database.transaction(writes=False) as execute:
            for name in tables.names:
                execute(f"SELECT * FROM {name} WHERE 1 = 0")
    except StoreError:
        return False
    return True
