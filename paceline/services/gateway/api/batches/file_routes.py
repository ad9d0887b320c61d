"""The routes of files."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from paceline.core.config import GatewayConfig
from paceline.core.options import parse_bytes
from paceline.services.gateway.api.api_schema import answers, text_of
from paceline.services.gateway.api.batches.batch_store import BatchStore
from paceline.services.gateway.api.batches.bodies import (
    LEAST_FILE_SECONDS,
    MOST_FILE_SECONDS,
    DeletedFile,
    FileBody,
    FileList,
    page,
)
from paceline.services.gateway.api.batches.file_store import (
    CHUNK_BYTES,
    File,
    FileStore,
    MissingFileError,
    OtherFileError,
    new_id,
)
from paceline.services.gateway.api.batches.pages import Order
from paceline.services.gateway.api.batches.upload import Upload
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import aside, id_of_made, key_was_used, scope_of

PURPOSE = "batch"
"""The only purpose that an uploaded file may have."""
_CONTENT = "application/jsonl"

_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}

Json = dict[str, Any]


def add_files(router: APIRouter, config: GatewayConfig, files: FileStore, batches: BatchStore) -> None:
    """Add the routes of files to a router."""
    api = FilesApi(config, files, batches)
    router.post("/v1/files", response_model=None, responses=answers(FileBody), openapi_extra=_UPLOAD)(api.upload)
    router.get("/v1/files", response_model=None, responses=answers(FileList))(api.list_files)
    router.get("/v1/files/{file_id}", response_model=None, responses=answers(FileBody))(api.get)
    router.get("/v1/files/{file_id}/content", response_class=Response, responses=text_of(_CONTENT))(api.content)
    router.delete("/v1/files/{file_id}", response_model=None, responses=answers(DeletedFile))(api.delete)


class FilesApi:
    """The routes of files."""

    def __init__(self, config: GatewayConfig, files: FileStore, batches: BatchStore) -> None:
        self._files = files
        self._batches = batches
        self._keep_seconds = config.stored_files_seconds
        self._most_bytes = parse_bytes(config.max_file_size)

    async def _find(self, file_id: str, request: Request) -> File:
        return found(await self._files.get(file_id, scope_of(request).caller.only_owner), file_id)

    async def upload(self, request: Request) -> Json:
        now = time.time()
        reader = Upload(request.headers.get("content-type", ""))
        file_id = f"file-{id_of_made(request)}"
        # Two tries of one request may come at the same time, so each writes a file of its own.
        made = File(new_id(), scope_of(request).owner, PURPOSE, "", 0, now, now + self._keep_seconds)
        await self._files.begin(made)
        try:
            await _receive(request, reader, made, self._files, self._most_bytes)
            expires = _expires(reader.fields, now, self._keep_seconds)
            named = dataclasses.replace(made, filename=reader.filename or "", expires=expires)
            return _body(await self._files.finish(named, as_id=file_id))
        except BaseException as error:
            # If the store fails now, the file expires soon, because it is not complete.
            with contextlib.suppress(Exception):
                await self._files.discard(made.id)
            if isinstance(error, OtherFileError):
                raise key_was_used(f"the file {file_id!r}") from None
            raise

    async def list_files(
        self,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Order = "desc",
        purpose: str = "",
    ) -> Response:
        first = None if after is None else await self._find(after, request)
        listed = await self._files.page(scope_of(request).caller.only_owner, purpose, first, limit + 1, order)
        return await aside(request, lambda: JSONResponse(page([_body(file) for file in listed], limit)))

    async def get(self, file_id: str, request: Request) -> Json:
        return _body(await self._find(file_id, request))

    async def content(self, file_id: str, request: Request) -> Response:
        file = await self._find(file_id, request)
        # With its length, a client notices if the file is deleted or the store fails meanwhile.
        length = {"content-length": str(file.size)}
        return StreamingResponse(self._files.content(file.id), headers=length, media_type=_CONTENT)

    async def delete(self, file_id: str, request: Request) -> Json:
        file = await self._find(file_id, request)
        try:
            await self._files.delete(file.id, self._batches.unused(file.id))
        except MissingFileError:
            raise file_not_found(file.id) from None
        return {"id": file.id, "object": "file", "deleted": True}


def found(file: File | None, file_id: str, param: str = "file_id") -> File:
    """Return a file that a store has found. Raises ApiError 404 if the store has found none."""
    if file is None:
        raise file_not_found(file_id, param)
    return file


def file_not_found(file_id: str, param: str = "file_id") -> ApiError:
    """Return the error of a file that does not exist, or that its client may not see."""
    return ApiError(404, f"No such file: {file_id!r}", param=param)


async def _receive(request: Request, reader: Upload, file: File, files: FileStore, most_bytes: int) -> None:
    """Write the file in a multipart body to the store while the body comes. Raises ApiError if it is not valid."""
    number = size = 0
    async for chunk in _chunks(request, reader):
        size += len(chunk)
        if size > most_bytes:
            raise ApiError(413, f"the file is larger than {most_bytes} bytes (--max-file-size)", param="file")
        await files.append(file, number, chunk)
        number += 1
    if reader.fields.get("purpose") != PURPOSE:
        raise ApiError(400, f"purpose: this server takes files with the purpose {PURPOSE!r} only", param="purpose")


async def _chunks(request: Request, reader: Upload) -> AsyncIterator[bytes]:
    """Yield the file in a multipart body in pieces of CHUNK_BYTES while the body comes. The last piece may be smaller.

    Raises ApiError if the body is not valid.
    """
    body, content = bytearray(), bytearray()
    async for piece in request.stream():
        body += piece
        if piece and len(body) < CHUNK_BYTES:
            continue
        # On a thread, because a body may be made such that it takes long to read.
        for data in await aside(request, reader.feed, bytes(body)):
            content += data
        body.clear()
        while len(content) >= CHUNK_BYTES:
            yield bytes(content[:CHUNK_BYTES])
            del content[:CHUNK_BYTES]
    reader.finish()
    if content:
        yield bytes(content)


def _expires(fields: dict[str, str], now: float, seconds: float) -> float:
    """Return the instant at which an uploaded file expires, in seconds since the epoch.

    Args:
        fields: the fields of the multipart body.
        now: the present, in seconds since the epoch.
        seconds: time for which files are kept by default.
    """
    wanted = fields.get("expires_after[seconds]")
    if wanted is None and "expires_after[anchor]" not in fields:
        return now + seconds
    if fields.get("expires_after[anchor]") != "created_at":
        raise ApiError(400, 'expires_after: anchor must be "created_at"', param="expires_after")
    number = int(wanted) if wanted is not None and wanted.isascii() and wanted.isdigit() else 0
    if not LEAST_FILE_SECONDS <= number <= MOST_FILE_SECONDS:
        limits = f"{LEAST_FILE_SECONDS} to {MOST_FILE_SECONDS}"
        raise ApiError(400, f"expires_after: seconds must be an integer of {limits}", param="expires_after")
    return now + number


def _body(file: File) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
