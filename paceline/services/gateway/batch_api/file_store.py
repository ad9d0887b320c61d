"""Files and their content, in rows of at most CHUNK_BYTES, so that no file is ever in memory as a whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.batch_api.pages import Order, read_page
from paceline.services.gateway.store.database import Database, Execute
from paceline.services.gateway.store.store import Store, Tables

CHUNK_BYTES = 256 << 10
UPLOAD_SECONDS = 3600.0
"""An upload that is not complete after this many seconds is deleted."""

_COLUMNS = "id, owner, purpose, filename, size, created, expires"
_COMPLETE = "status = 'processed' AND expires >= :now"


class QuotaError(InvalidRequestError):
    """An API key has too many files, too large ones, or too many batches."""


@dataclass(frozen=True, slots=True)
class File:
    """A file. Times are seconds since the epoch."""

    id: str
    owner: str
    """Digest of the API key that made it."""
    purpose: str
    filename: str
    size: int
    """In bytes."""
    created: float
    expires: float


class FileStore:
    """Files by id. All methods raise StoreError if the database cannot be used.

    Args:
        entries: the largest number of files of one owner.
        max_bytes: the largest size of the files of one owner together.
    """

    def __init__(self, store: Store, *, entries: int, max_bytes: int) -> None:
        self._store = store
        store.add_tables(_TABLES)
        self._entries = entries
        self._max_bytes = max_bytes

    async def begin(self, file: File, *, limited: bool = True) -> None:
        """Make a file that nobody sees until it is complete. A file of the same id is replaced.

        Args:
            limited: whether the owner's quota holds. It does not hold for answers, which count but are never lost.

        Raises QuotaError if the owner has as many files as it may.
        """

        def begin(execute: Execute) -> None:
            now = time.time()
            _delete(execute, "id = :id", {"id": file.id})
            ((count,),), _ = execute("SELECT COUNT(*) FROM paceline_files WHERE owner = :owner", {"owner": file.owner})
            if limited and count >= self._entries:
                message = f"there are {count} files of this key, as many as it may have (--stored-files); delete some"
                raise QuotaError(message, "file")
            fields = {name: getattr(file, name) for name in ("id", "owner", "purpose", "filename", "created")}
            execute(
                f"INSERT INTO paceline_files ({_COLUMNS}, status) VALUES "
                "(:id, :owner, :purpose, :filename, 0, :created, :expires, 'uploading')",
                {**fields, "expires": now + UPLOAD_SECONDS},
            )

        await self._store.run(begin)

    async def check_quota(self, owner: str) -> None:
        """Raise QuotaError if the files of an owner exceed its quota, as files of answers may."""
        query = "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM paceline_files WHERE owner = :owner"
        rows, _ = await self._store.run(lambda execute: execute(query, {"owner": owner}), writes=False)
        ((count, size),) = rows
        if count > self._entries or size > self._max_bytes:
            message = (
                f"this key has {count} files with {size} bytes, more than it may have (--stored-files, "
                "--stored-files-size); delete some"
            )
            raise QuotaError(message)

    async def append(self, file: File, number: int, data: bytes, *, limited: bool = True) -> None:
        """Add chunk `number` of a file. Raises QuotaError if all files of its owner are too large then."""

        def append(execute: Execute) -> None:
            fields = {"id": file.id, "number": number, "data": data}
            execute("INSERT INTO paceline_file_chunks (file_id, number, data) VALUES (:id, :number, :data)", fields)
            grown = {"id": file.id, "size": len(data)}
            execute("UPDATE paceline_files SET size = size + :size WHERE id = :id", grown)
            query = "SELECT COALESCE(SUM(size), 0) FROM paceline_files WHERE owner = :owner"
            ((total,),), _ = execute(query, {"owner": file.owner})
            if limited and total > self._max_bytes:
                message = f"all files of this key may have {self._max_bytes} bytes (--stored-files-size); delete some"
                raise QuotaError(message, "file")

        await self._store.run(append)

    async def finish(self, file: File) -> File:
        """Make a file visible, with its purpose, name and expiry. Return it with its size."""

        def finish(execute: Execute) -> File:
            fields = {name: getattr(file, name) for name in ("id", "purpose", "filename", "expires")}
            changes = "status = 'processed', purpose = :purpose, filename = :filename, expires = :expires"
            execute(f"UPDATE paceline_files SET {changes} WHERE id = :id", fields)
            rows, _ = execute(f"SELECT {_COLUMNS} FROM paceline_files WHERE id = :id", {"id": file.id})
            return File(*rows[0])

        return await self._store.run(finish)

    async def discard(self, file_id: str) -> None:
        """Delete a file, complete or not, if there is one."""
        await self._store.run(lambda execute: _delete(execute, "id = :id", {"id": file_id}))

    async def delete_expired(self) -> None:
        """Delete the files whose time is over."""
        await self._store.run(lambda execute: _delete(execute, "expires < :now", {"now": time.time()}))

    async def get(self, file_id: str, owner: str | None) -> File | None:
        """Return a file of an owner (None: of any); None if there is none."""
        fields = {"id": file_id, "now": time.time()}
        query = f"SELECT {_COLUMNS} FROM paceline_files WHERE id = :id AND {_COMPLETE}"
        rows, _ = await self._store.run(lambda execute: execute(query, fields), writes=False)
        found = File(*rows[0]) if rows else None
        return found if found is not None and owner in (None, found.owner) else None

    async def page(self, owner: str | None, purpose: str, after: File | None, limit: int, order: Order) -> list[File]:
        """Return at most `limit` files in order of creation.

        Args:
            owner: None for all owners.
            purpose: "" for all purposes.
            after: the file before the first one; None begins with the first one of all.
        """
        query = f"SELECT {_COLUMNS} FROM paceline_files WHERE {_COMPLETE}"
        wanted = {"owner": owner, "purpose": purpose or None}
        return [File(*row) for row in await read_page(self._store, query, wanted, after, limit, order)]

    async def keep(self, file_id: str, until: float) -> None:
        """Let a file expire no earlier than at an instant, in seconds since the epoch."""
        statement = "UPDATE paceline_files SET expires = :until WHERE id = :id AND expires < :until"
        await self._store.run(lambda execute: execute(statement, {"id": file_id, "until": until}))

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield the content of a file in pieces."""
        number = 0
        query = "SELECT data FROM paceline_file_chunks WHERE file_id = :id AND number = :number"
        while rows := await self._read(query, {"id": file_id, "number": number}):
            yield bytes(rows[0][0])
            number += 1

    async def _read(self, query: str, fields: dict[str, Any]) -> list[tuple[Any, ...]]:
        return (await self._store.run(lambda execute: execute(query, fields), writes=False))[0]


def new_id() -> str:
    """Return a new id of a file."""
    return f"file-{uuid.uuid4().hex}"


def _delete(execute: Execute, where: str, fields: dict[str, Any]) -> None:
    """Delete the files that meet a condition, with their content."""
    found, _ = execute(f"SELECT id FROM paceline_files WHERE {where}", fields)
    for (file_id,) in found:
        execute("DELETE FROM paceline_file_chunks WHERE file_id = :id", {"id": file_id})
        execute("DELETE FROM paceline_files WHERE id = :id", {"id": file_id})


def _statements(database: Database) -> list[str]:
    return [
        "CREATE TABLE paceline_files (id VARCHAR(64) PRIMARY KEY, owner VARCHAR(64) NOT NULL, "
        "purpose VARCHAR(32) NOT NULL, filename VARCHAR(512) NOT NULL, size BIGINT NOT NULL, "
        "created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION NOT NULL, status VARCHAR(16) NOT NULL)",
        "CREATE INDEX paceline_files_owner ON paceline_files (owner, created)",
        "CREATE INDEX paceline_files_expires ON paceline_files (expires)",
        "CREATE TABLE paceline_file_chunks (file_id VARCHAR(64) NOT NULL, number INTEGER NOT NULL, "
        f"data {database.blob} NOT NULL, PRIMARY KEY (file_id, number))",
    ]


_TABLES = Tables(["paceline_files", "paceline_file_chunks"], _statements)
