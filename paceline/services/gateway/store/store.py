"""One database, its tables, and the thread on which it is used."""

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
from paceline.services.gateway.http.fair_pool import FairPool
from paceline.services.gateway.store.database import ANSWER_SECONDS, ConflictError, Database, Execute, StoreError

T = TypeVar("T")

CONFLICT_SECONDS = (0.02, 0.1, 0.5)
"""Mean delays before each retry of a transaction that conflicted with another one, in seconds."""

Check = Callable[[Execute], None]
"""A function that checks a condition of a write, in the write's own transaction. It raises an error if the condition is
false."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables that belong together and are created together, when they are first needed."""

    names: Sequence[str]
    statements: Callable[[Database], Sequence[str]]
    """A function that returns the statements that create the tables, with the column types of a database. Each
    statement runs in a transaction of its own."""


class Store:
    """A database that all parts of a gateway share. It does their work one after another, on one thread.

    Args:
        database: the database. `close` closes it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._missing: list[Tables] = []
        # One thread, because a connection serves one thread at a time. Owners take turns, because to read a long
        # conversation may take a second.
        self._pool = FairPool(1, "store")

    def add_tables(self, tables: Tables) -> None:
        """Register tables, which are created before the next work unless they exist."""
        self._missing.append(tables)

    async def run(self, work: Callable[[Execute], T], *, writes: bool = True) -> T:
        """Run `work` in one transaction and return its result. Raises StoreError and the errors of `work`.

        If this call raises an error or is cancelled, the work has no effect, unless its COMMIT had already begun.

        Args:
            work: the function to run. It may run more than once, because its transaction may be rolled back.
            writes: whether the work may change data.
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
        """Wait for the work that is being done, and close the database."""
        self._pool.close(self._database.close)


def _run_again(run: Callable[[], T]) -> T:
    """Run a transaction, with retries if it conflicts with another one. Raises ConflictError if all tries conflict."""
    for seconds in CONFLICT_SECONDS:
        try:
            return run()
        except ConflictError:
            time.sleep(seconds * random.uniform(0.5, 1.5))
    return run()


def _make_tables(database: Database, tables: Tables) -> None:
    """Create tables, unless they exist. SQL has no portable statement for this.

    Another gateway may be creating the same tables, or may have created only some of them before it ended. So each
    statement has a transaction of its own and may fail. In the end all tables must exist.

    Raises StoreError if a table is missing then, or at once if the database does not answer.
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
