"""The routes of batches, and the stores and the runner that files and batches need."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.types import ASGIApp

from paceline.core.options import parse_bytes
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.batches.batch import ENDPOINTS, Batch, window_seconds
from paceline.services.gateway.api.batches.batch_store import BatchStore
from paceline.services.gateway.api.batches.bodies import BatchBody, BatchList, CreateBatch, page
from paceline.services.gateway.api.batches.file_routes import PURPOSE, add_files, file_not_found, found
from paceline.services.gateway.api.batches.file_store import FileStore, MissingFileError
from paceline.services.gateway.api.batches.messages import add_message_batches
from paceline.services.gateway.api.batches.runner import BatchRunner
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.paths import DECISIONS
from paceline.services.gateway.http.request_scope import id_of_made, key_was_used, scope_of
from paceline.services.gateway.store.store import Store

Json = dict[str, Any]


def add_batches(router: APIRouter, gateway: Gateway, store: Store | None, app: ASGIApp) -> BatchRunner | None:
    """Add the routes of files and batches. Return the runner of batches, which the caller starts and closes.

    Args:
        store: the database for files and batches. If it is None, all routes answer 501, and nothing runs.
        app: the application that answers lines.
    """
    if store is None:
        _add_refusals(router)
        return None
    config = gateway.config
    files = FileStore(store, entries=config.stored_files, max_bytes=parse_bytes(config.stored_files_size))
    batches = BatchStore(store, most=config.max_batches, seconds=config.stored_files_seconds)
    runner = BatchRunner(gateway, batches, files, app)
    add_files(router, config, files, batches)
    add_message_batches(router, config, files, batches, runner)
    api = BatchesApi(files, batches, runner, config.stored_files_seconds)
    router.post("/v1/batches", response_model=None, responses=answers(BatchBody))(api.create)
    router.get("/v1/batches", response_model=None, responses=answers(BatchList))(api.list_batches)
    router.get("/v1/batches/{batch_id}", response_model=None, responses=answers(BatchBody))(api.get)
    router.post("/v1/batches/{batch_id}/cancel", response_model=None, responses=answers(BatchBody))(api.cancel)
    return runner


class BatchesApi:
    """The routes of batches.

    Args:
        keep_seconds: seconds for which files are kept after a batch has ended.
    """

    def __init__(self, files: FileStore, batches: BatchStore, runner: BatchRunner, keep_seconds: float) -> None:
        self._files = files
        self._batches = batches
        self._runner = runner
        self._keep_seconds = keep_seconds

    async def _find(self, batch_id: str, request: Request) -> Batch:
        batch = await self._batches.get(batch_id, scope_of(request).caller.only_owner)
        if batch is None or batch.endpoint not in ENDPOINTS:
            raise _not_found(batch_id)
        return batch

    async def create(self, body: CreateBatch, request: Request) -> Json:
        owner, now = scope_of(request).owner, time.time()
        seconds = _check(body)
        after = body.output_expires_after
        batch = Batch(
            id=f"batch_{id_of_made(request)}",
            owner=owner,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created=now,
            expires=now + seconds,
            metadata=body.metadata or {},
            output_seconds=None if after is None else after.seconds,
        )
        added = await self._batches.get(batch.id, owner) or await self._add(batch)
        if not added.asks_the_same(batch):
            raise key_was_used(f"the batch {added.id!r}")
        return added.to_api()

    async def _add(self, batch: Batch) -> Batch:
        """Add a batch to the store. Raises ApiError or QuotaError if it is refused."""
        file = found(await self._files.get(batch.input_file_id, batch.owner), batch.input_file_id, "input_file_id")
        if file.purpose != PURPOSE:
            message = f"input_file_id: the file has the purpose {file.purpose!r}, not {PURPOSE!r}"
            raise ApiError(400, message, param="input_file_id")
        await self._files.check_quota(batch.owner)
        # The file is read until the batch has ended.
        hold = self._files.hold(file.id, batch.expires + self._keep_seconds)
        try:
            added = await self._batches.add(batch, hold)
        except MissingFileError:
            raise file_not_found(file.id, "input_file_id") from None
        self._runner.wake()
        return added

    async def list_batches(
        self, request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Json:
        first = None if after is None else await self._find(after, request)
        listed = await self._batches.page(scope_of(request).caller.only_owner, first, limit + 1)
        return page([batch.to_api() for batch in listed], limit)

    async def get(self, batch_id: str, request: Request) -> Json:
        return (await self._find(batch_id, request)).to_api()

    async def cancel(self, batch_id: str, request: Request) -> Json:
        return (await self._runner.cancel(await self._find(batch_id, request))).to_api()


def _check(body: CreateBatch) -> int:
    """Check the body of a new batch. Return its completion window in seconds. Raises ApiError if it is not valid."""
    if body.endpoint not in ENDPOINTS:
        message = f"endpoint: not for batches; this server takes {', '.join(ENDPOINTS)}"
        raise ApiError(400, message, param="endpoint", code="invalid_endpoint")
    seconds = window_seconds(body.completion_window)
    if seconds is None:
        message = 'completion_window must be a number of minutes, hours or days up to 30d, such as "24h"'
        raise ApiError(400, message, param="completion_window")
    return seconds


def _not_found(batch_id: str) -> ApiError:
    return ApiError(404, f"No batch found with id {batch_id!r}.", param="batch_id")


def _add_refusals(router: APIRouter) -> None:
    async def refuse() -> None:
        message = "this server keeps no files and batches; start it with --store"
        raise ApiError(501, message, type="not_implemented")

    for path in (path for path in DECISIONS if path.startswith(("/v1/files", "/v1/batches", "/v1/messages/batches"))):
        router.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
