"""Files and their content, in rows of at most CHUNK_BYTES, so that no file is ever in memory as a whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.batches.pages import Order, read_page
from paceline.services.gateway.store.database import Database, Execute
from paceline.services.gateway.store.store import Check, Store, Tables

CHUNK_BYTES = 256 << 10
UPLOAD_SECONDS = 3600.0
"""Seconds without new data after which an incomplete file is deleted."""

_COLUMNS = "id, owner, purpose, filename, size, created, expires"
_COMPLETE = "status = 'processed' AND expires >= :now"
_INCOMPLETE = "status = 'uploading'"


class QuotaError(InvalidRequestError):
    """An API key has too many files, too large files, or too many batches."""


class MissingFileError(InvalidRequestError):
    """The file does not exist, because it was deleted or has expired."""


class OtherFileError(InvalidRequestError):
    """Another file, with other content, has this id already."""


@dataclass(frozen=True, slots=True)
class File:
    """A file. Times are seconds since the epoch."""

    id: str
    owner: str
    """Digest of the API key that made it."""
    purpose: str
    filename: str
    size: int
    """Size of the content in bytes."""
    created: float
    expires: float


class FileStore:
    """Keeps files by id. All methods raise StoreError if the database cannot be used.

    Args:
        entries: the largest number of files of one owner.
        max_bytes: largest size of all files of one owner together.
    """

    def __init__(self, store: Store, *, entries: int, max_bytes: int) -> None:
        self._store = store
        store.add_tables(_TABLES)
        self._entries = entries
        self._max_bytes = max_bytes

    async def begin(self, file: File, lease: Check | None = None) -> None:
        """Make an incomplete, invisible file without content. A file of the same id is replaced.

        Args:
            lease: checks that the writer still has the lease of the batch whose answers the file has. Such a file
                counts but is kept even above the owner's quota. None for an upload, which the quota limits.

        Raises QuotaError if an upload's owner has as many files as the quota allows.
        """

        def begin(execute: Execute) -> None:
            if lease is not None:
                lease(execute)
            now = time.time()
            _delete(execute, "id = :id", {"id": file.id})
            ((count,),), _ = execute("SELECT COUNT(*) FROM paceline_files WHERE owner = :owner", {"owner": file.owner})
            if lease is None and count >= self._entries:
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
        """Raise QuotaError if an owner's files exceed its quota, which files of answers may do."""
        query = "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM paceline_files WHERE owner = :owner"
        rows, _ = await self._store.run(lambda execute: execute(query, {"owner": owner}), writes=False)
        ((count, size),) = rows
        if count > self._entries or size > self._max_bytes:
            message = (
                f"this key has {count} files with {size} bytes, more than it may have (--stored-files, "
                "--stored-files-size); delete some"
            )
            raise QuotaError(message)

    async def append(self, file: File, number: int, data: bytes, lease: Check | None = None) -> None:
        """Add chunk `number` of a file that is not complete.

        Args:
            lease: see `begin`.

        Raises MissingFileError, or QuotaError if all files of the owner together would be too large.
        """

        def append(execute: Execute) -> None:
            if lease is not None:
                lease(execute)
            grown = {"id": file.id, "size": len(data), "expires": time.time() + UPLOAD_SECONDS}
            changes = "size = size + :size, expires = :expires"
            if not execute(f"UPDATE paceline_files SET {changes} WHERE id = :id AND {_INCOMPLETE}", grown)[1]:
                raise _missing(file.id)
            fields = {"id": file.id, "number": number, "data": data}
            execute("INSERT INTO paceline_file_chunks (file_id, number, data) VALUES (:id, :number, :data)", fields)
            query = "SELECT COALESCE(SUM(size), 0) FROM paceline_files WHERE owner = :owner"
            ((total,),), _ = execute(query, {"owner": file.owner})
            if lease is None and total > self._max_bytes:
                message = f"all files of this key may have {self._max_bytes} bytes (--stored-files-size); delete some"
                raise QuotaError(message, "file")

        await self._store.run(append)

    async def finish(self, file: File, lease: Check | None = None, as_id: str = "") -> File:
        """Complete a file, which makes it visible with its purpose, name and expiry. Return the file with its size.

        Args:
            lease: see `begin`.
            as_id: the file's new id; "" keeps its own. If an equal file has this id, from an earlier try of the same
                upload, the equal file is returned and this one is deleted.

        Raises MissingFileError, or OtherFileError if an unequal file has this id.
        """

        def finish(execute: Execute) -> File:
            if lease is not None:
                lease(execute)
            fields = {name: getattr(file, name) for name in ("id", "purpose", "filename", "expires")}
            changes = "status = 'processed', purpose = :purpose, filename = :filename, expires = :expires"
            if not execute(f"UPDATE paceline_files SET {changes} WHERE id = :id AND {_INCOMPLETE}", fields)[1]:
                raise _missing(file.id)
            ((size,),), _ = execute("SELECT size FROM paceline_files WHERE id = :id", {"id": file.id})
            made = replace(file, size=size)
            if as_id in ("", file.id):
                return made
            _delete(execute, "id = :id AND expires < :now", {"id": as_id, "now": time.time()})
            if (known := _get(execute, as_id)) is None:
                names = {"id": file.id, "as_id": as_id}
                execute("UPDATE paceline_files SET id = :as_id WHERE id = :id", names)
                execute("UPDATE paceline_file_chunks SET file_id = :as_id WHERE file_id = :id", names)
                return replace(made, id=as_id)
            if (made.filename, made.purpose) != (known.filename, known.purpose) or not _have_equal_content(
                execute, made, known
            ):
                raise OtherFileError("another file has this id", "file")
            _delete(execute, "id = :id", {"id": file.id})
            return known

        return await self._store.run(finish)

    async def discard(self, file_id: str) -> None:
        """Delete a file, complete or not, if it exists. No batch may refer to it."""
        await self._store.run(lambda execute: _delete(execute, "id = :id", {"id": file_id}))

    async def delete(self, file_id: str, unused: Check) -> None:
        """Delete a complete file.

        Args:
            unused: checks that nothing reads the file. Its error leaves the file as it was.

        Raises MissingFileError.
        """

        def delete(execute: Execute) -> None:
            # This locks the row, so that no batch begins to read the file between the look and the deletion.
            lock = f"UPDATE paceline_files SET status = status WHERE id = :id AND {_COMPLETE}"
            if not execute(lock, {"id": file_id, "now": time.time()})[1]:
                raise _missing(file_id)
            unused(execute)
            _delete(execute, "id = :id", {"id": file_id})

        await self._store.run(delete)

    async def delete_expired(self, used: Callable[[Execute], Collection[str]]) -> None:
        """Delete the files that have expired, and uploads that were given up.

        Args:
            used: returns the ids of files that active batches read, which are kept.
        """

        def delete(execute: Execute) -> None:
            kept = used(execute)
            fields = {"now": time.time()}
            found, _ = execute("SELECT id FROM paceline_files WHERE expires < :now", fields)
            for (file_id,) in found:
                if file_id not in kept:
                    _delete(execute, "id = :id AND expires < :now", {**fields, "id": file_id})

        await self._store.run(delete)

    async def get(self, file_id: str, owner: str | None) -> File | None:
        """Return the complete file with an id; None if the owner has no such file. Owner None stands for any owner."""
        found = await self._store.run(lambda execute: _get(execute, file_id), writes=False)
        return found if found is not None and owner in (None, found.owner) else None

    async def page(self, owner: str | None, purpose: str, after: File | None, limit: int, order: Order) -> list[File]:
        """Return at most `limit` files in order of creation.

        Args:
            owner: None for all owners.
            purpose: "" for all purposes.
            after: the file before the page's first one; None begins with the first file of all.
        """
        query = f"SELECT {_COLUMNS} FROM paceline_files WHERE {_COMPLETE}"
        wanted = {"owner": owner, "purpose": purpose or None}
        return [File(*row) for row in await read_page(self._store, query, wanted, after, limit, order)]

    def hold(self, file_id: str, until: float) -> Check:
        """Return a check that a file exists, which raises MissingFileError.

        The check moves an earlier expiry of the file to `until` (seconds since the epoch), and locks the file's row.
        """

        def hold(execute: Execute) -> None:
            later = "expires = CASE WHEN expires < :until THEN :until ELSE expires END"
            statement = f"UPDATE paceline_files SET {later} WHERE id = :id AND {_COMPLETE}"
            if not execute(statement, {"id": file_id, "until": until, "now": time.time()})[1]:
                raise _missing(file_id)

        return hold

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield the content of a file in its chunks."""
        number = 0
        query = "SELECT data FROM paceline_file_chunks WHERE file_id = :id AND number = :number"
        while rows := await self._read(query, {"id": file_id, "number": number}):
            yield bytes(rows[0][0])
            number += 1

    async def _read(self, query: str, fields: dict[str, Any]) -> list[tuple[Any, ...]]:
        return (await self._store.run(lambda execute: execute(query, fields), writes=False))[0]


def new_id() -> str:
    """Return a new, random id for a file."""
    return f"file-{uuid.uuid4().hex}"


def _have_equal_content(execute: Execute, one: File, other: File) -> bool:
    """Return whether two files have the same chunks."""
    query = (
        "SELECT COUNT(*) FROM paceline_file_chunks a JOIN paceline_file_chunks b ON a.number = b.number "
        "AND a.data = b.data WHERE a.file_id = :one AND b.file_id = :other"
    )
    ((equal,),), _ = execute(query, {"one": one.id, "other": other.id})
    ((count,),), _ = execute("SELECT COUNT(*) FROM paceline_file_chunks WHERE file_id = :one", {"one": one.id})
    return one.size == other.size and equal == count


def _missing(file_id: str) -> MissingFileError:
    return MissingFileError(f"the file {file_id!r} was deleted, or has expired", "file_id")


def _get(execute: Execute, file_id: str) -> File | None:
    """Return the complete file with an id; None if there is none."""
    query = f"SELECT {_COLUMNS} FROM paceline_files WHERE id = :id AND {_COMPLETE}"
    rows, _ = execute(query, {"id": file_id, "now": time.time()})
    return File(*rows[0]) if rows else None


def _delete(execute: Execute, where: str, fields: dict[str, Any]) -> None:
    """Delete the files that meet an SQL condition, with their content."""
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
