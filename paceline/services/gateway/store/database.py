"""SQL databases, behind one interface: SQLite with Python's own module, and any other through SQLAlchemy.

All databases take statements with parameters such as `:name`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import ConfigError, InvalidRequestError, UnavailableError
from paceline.services.gateway.http.errors import is_unicode

BUSY_SECONDS = 10.0
"""Longest wait for another process that writes to the same SQLite file, in seconds."""
CONNECT_SECONDS = 10
"""Longest wait for a connection to a database server, in seconds."""
ANSWER_SECONDS = 60
"""Longest wait for the answer of a database server, in seconds."""
DRIVER_OPTIONS: Mapping[str, Mapping[str, int]] = {
    "psycopg": {"connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": 1000 * ANSWER_SECONDS},
    "pymysql": {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": ANSWER_SECONDS,
        "write_timeout": ANSWER_SECONDS,
    },
}
"""Default arguments of connections, by driver. Arguments in the database's URL take precedence."""

CONFLICTS = frozenset({"40001", "40P01", 1020, 1213})
"""Error codes for conflicts between transactions, in PostgreSQL (texts) and in MySQL and MariaDB (numbers)."""

Row = tuple[Any, ...]


class StoreError(UnavailableError):
    """The store cannot be used now.

    Args:
        message: the message for the client.
        reason: the database's own message, for the log only, because it may name files, hosts and users.
    """

    def __init__(
        self, message: str = "the server's store cannot be used now; try again later", reason: str = ""
    ) -> None:
        super().__init__(message)
        self.reason = reason


class ConflictError(StoreError):
    """A transaction conflicted with another one. It has been rolled back and can run again."""


class Execute(Protocol):
    """A function that executes one statement."""

    def __call__(self, statement: str, parameters: Mapping[str, Any] = ...) -> tuple[list[Row], int]:
        """Execute a statement. Return the rows of a query, and the number of rows that the statement changed."""


class Database(ABC):
    """Interface of a database. Only one thread may use it at a time."""

    text = "TEXT"
    """SQL type of columns with long texts."""
    blob = "BLOB"
    """SQL type of columns with bytes."""

    @abstractmethod
    def transaction(self, *, writes: bool = True) -> contextlib.AbstractContextManager[Execute]:
        """Return a context for statements that take effect together or not at all. Raises StoreError.

        Args:
            writes: whether statements may change data. A transaction that only reads need not wait for one that writes.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


class SqliteDatabase(Database):
    """A SQLite file, which is created when it is first used. Only its owner may read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    @contextlib.contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[Execute]:
        try:
            connection = self._connection = self._connection or self._connect()
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield lambda statement, parameters={}: _rows(connection.execute(statement, _checked(parameters)))
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError) as error:
            raise StoreError(reason=f"{self._path}: {error}") from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(self._path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            # The log lets others read while one process writes. A power cut may lose the last transactions.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _rows(cursor: sqlite3.Cursor) -> tuple[list[Row], int]:
    return cursor.fetchall(), cursor.rowcount


class AlchemyDatabase(Database):
    """A database of any kind for which SQLAlchemy has a driver. Raises ConfigError if there is no driver."""

    def __init__(self, url: str) -> None:
        try:
            import sqlalchemy
        except ImportError:
            message = "--store is a URL, which needs the package SQLAlchemy: pip install 'paceline[sql]'"
            raise ConfigError(message) from None
        try:
            parsed = sqlalchemy.make_url(url)
            options = DRIVER_OPTIONS.get(parsed.get_driver_name(), {})
            options = {name: value for name, value in options.items() if name not in parsed.query}
            self._engine = sqlalchemy.create_engine(parsed, pool_pre_ping=True, connect_args=options)
        except (sqlalchemy.exc.ArgumentError, ImportError) as error:
            raise ConfigError(f"--store: SQLAlchemy cannot use this URL: {error}") from error
        self._statement = sqlalchemy.text
        self._error = sqlalchemy.exc.SQLAlchemyError
        self._first = ""
        """SQL statement that runs first in each transaction; "" if there is none."""
        if self._engine.dialect.name in ("mysql", "mariadb"):
            self.text, self.blob = "LONGTEXT", "LONGBLOB"
        elif self._engine.dialect.name == "postgresql":
            self.blob = "BYTEA"
            if "statement_timeout" not in str(parsed.query.get("options", "")):  # else the operator has chosen
                self._first = f"SET LOCAL statement_timeout = {1000 * ANSWER_SECONDS}"
        if self._engine.dialect.name != "sqlite":
            # Each statement sees what others have committed. MySQL would show, and MariaDB refuse to change, old rows.
            self._engine = self._engine.execution_options(isolation_level="READ COMMITTED")

    @contextlib.contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[Execute]:
        try:
            with self._engine.begin() as connection:
                # Without LOCAL, the limit would stay in a pool of connections such as PgBouncer, for others.
                if self._first:
                    connection.exec_driver_sql(self._first)

                def execute(statement: str, parameters: Mapping[str, Any] = {}) -> tuple[list[Row], int]:
                    result = connection.execute(self._statement(statement), dict(_checked(parameters)))
                    return [tuple(row) for row in result] if result.returns_rows else [], result.rowcount

                yield execute
        except self._error as error:
            kind = ConflictError if _code(error) in CONFLICTS else StoreError
            # Further lines hold the statement and its values.
            raise kind(reason=str(error).splitlines()[0]) from error

    def close(self) -> None:
        self._engine.dispose()


def _code(error: Exception) -> object:
    """Return the database server's error code in an error of SQLAlchemy; None if it has no code."""
    own = getattr(error, "orig", None)
    if (code := getattr(own, "sqlstate", None) or getattr(own, "pgcode", None)) is not None:
        return code
    return own.args[0] if isinstance(own, Exception) and own.args else None


def _checked(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a statement. Raises InvalidRequestError if a text cannot be stored in every database.

    Texts in parameters are names and ids from clients, or JSON, in which all such characters are escaped.
    """
    for value in values.values():
        if isinstance(value, str) and ("\0" in value or not is_unicode(value)):
            raise InvalidRequestError("names and ids cannot have the character NUL, or half of a surrogate pair")
    return values


def open_database(place: str) -> Database:
    """Return the database at the path of a SQLite file or at a URL. Raises ConfigError if its driver is missing."""
    return AlchemyDatabase(place) if "://" in place else SqliteDatabase(Path(place).expanduser())
