"""One database, its tables, and the thread that uses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from paceline.services.gateway.store.database import Database, Execute, StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables that are created together, when they are first needed."""

    probe: str
    """A query that fails if the tables do not exist."""
    statements: Callable[[Database], Sequence[str]]
    """Returns the statements that create them, in the types of a database."""


class Store:
    """A database that all parts of a gateway use, one after another.

    Args:
        database: is closed with the store.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._missing: list[Tables] = []
        # One thread, because a connection serves one thread at a time.
        self._thread = ThreadPoolExecutor(1, "store")

    def add_tables(self, tables: Tables) -> None:
        """Have tables created before the next work, unless they exist."""
        self._missing.append(tables)

    async def run(self, work: Callable[[Execute], T], *, writes: bool = True) -> T:
        """Run `work` in one transaction and return its result. Raises StoreError and the errors of `work`.

        Args:
            writes: whether the work may change something.
        """

        def run() -> T:
            try:
                while self._missing:
                    _make_tables(self._database, self._missing[0])
                    del self._missing[0]
                with self._database.transaction(writes=writes) as execute:
                    return work(execute)
            except StoreError as error:
                if error.reason:
                    log.error("the store cannot be used (%s); see --store", error.reason)
                raise

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def close(self) -> None:
        """Wait for what is being written, and close the database."""
        self._thread.submit(self._database.close)
        self._thread.shutdown()


def _make_tables(database: Database, tables: Tables) -> None:
    """Create tables, unless they exist. SQL has no common statement for that."""
    if _exist(database, tables):
        return
    try:
        with database.transaction() as execute:
            for statement in tables.statements(database):
                execute(statement)
    except StoreError:
        # Another gateway may have been faster.
        if not _exist(database, tables):
            raise


def _exist(database: Database, tables: Tables) -> bool:
    try:
        with database.transaction(writes=False) as execute:
            execute(tables.probe)
    except StoreError:
        return False
    return True
