"""Anthropic's message batches, built on batches in OpenAI's form.

The requests of a message batch become an input file whose lines name /v1/messages. Results are read from the files of
answers. If the batch was cancelled or has failed, the input file tells which requests have no answer.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from paceline.core.config import GatewayConfig
from paceline.services.gateway.api.api_schema import answers, text_of
from paceline.services.gateway.api.batches.batch import Batch
from paceline.services.gateway.api.batches.batch_store import MESSAGE_BATCH, BatchStore
from paceline.services.gateway.api.batches.bodies import (
    CreateMessageBatch,
    DeletedMessageBatch,
    MessageBatchBody,
    MessageBatchList,
    page,
)
from paceline.services.gateway.api.batches.file_routes import PURPOSE
from paceline.services.gateway.api.batches.file_store import (
    CHUNK_BYTES,
    File,
    FileStore,
    MissingFileError,
    OtherFileError,
    new_id,
)
from paceline.services.gateway.api.batches.lines import split_lines
from paceline.services.gateway.api.batches.pages import Order
from paceline.services.gateway.api.batches.runner import BatchRunner
from paceline.services.gateway.api.messages.bodies import MESSAGE_ERRORS
from paceline.services.gateway.http.error_responses import messages_error_body
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import aside, id_of_made, key_was_used, scope_of

ENDPOINT = "/v1/messages"
WINDOW, WINDOW_SECONDS = "24h", 86400
PATH = "/v1/messages/batches"
_RESULTS = "application/x-jsonl"

Json = dict[str, Any]


def add_message_batches(
    router: APIRouter, config: GatewayConfig, files: FileStore, batches: BatchStore, runner: BatchRunner
) -> None:
    """Add the routes of message batches to a router."""
    api = MessageBatchesApi(config, files, batches, runner)
    router.post(PATH, response_model=None, responses=answers(MessageBatchBody) | MESSAGE_ERRORS)(api.create)
    router.get(PATH, response_model=None, responses=answers(MessageBatchList) | MESSAGE_ERRORS)(api.list_batches)
    router.get(PATH + "/{batch_id}", response_model=None, responses=answers(MessageBatchBody) | MESSAGE_ERRORS)(api.get)
    router.post(PATH + "/{batch_id}/cancel", response_model=None, responses=answers(MessageBatchBody) | MESSAGE_ERRORS)(
        api.cancel
    )
    router.get(PATH + "/{batch_id}/results", response_class=Response, responses=text_of(_RESULTS) | MESSAGE_ERRORS)(
        api.results
    )
    router.delete(PATH + "/{batch_id}", response_model=None, responses=answers(DeletedMessageBatch) | MESSAGE_ERRORS)(
        api.delete
    )


class MessageBatchesApi:
    """The routes of Anthropic's message batches."""

    def __init__(self, config: GatewayConfig, files: FileStore, batches: BatchStore, runner: BatchRunner) -> None:
        self._files = files
        self._batches = batches
        self._runner = runner
        self._keep_seconds = config.stored_files_seconds
        self._most_requests = config.max_batch_lines

    async def _find(self, batch_id: str, request: Request) -> Batch:
        batch = await self._batches.get(batch_id, scope_of(request).caller.only_owner)
        if batch is None or batch.endpoint != ENDPOINT:
            raise ApiError(404, f"No message batch found with id {batch_id!r}.", param="batch_id")
        return batch

    async def create(self, body: CreateMessageBatch, request: Request) -> Json:
        owner, now, made = scope_of(request).owner, time.time(), id_of_made(request)
        await aside(request, _check, body, self._most_requests)
        await self._files.check_quota(owner)
        expires = now + WINDOW_SECONDS + self._keep_seconds
        file = File(new_id(), owner, PURPOSE, f"{MESSAGE_BATCH}_{made}.jsonl", 0, now, expires)
        try:
            chunks = await aside(request, lambda: list(_chunks(body)))
            file = await _write(self._files, file, chunks, f"file-{made}")
        except OtherFileError:
            raise key_was_used(f"the batch {MESSAGE_BATCH}_{made}") from None
        batch = Batch(
            id=f"{MESSAGE_BATCH}_{made}",
            owner=owner,
            endpoint=ENDPOINT,
            input_file_id=file.id,
            completion_window=WINDOW,
            created=now,
            expires=now + WINDOW_SECONDS,
            total=len(body.requests),
        )
        added = await self._batches.add(batch, self._files.hold(file.id, expires))
        self._runner.wake()
        return shown(added)

    async def list_batches(
        self,
        request: Request,
        after_id: str | None = None,
        before_id: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    ) -> Json:
        if after_id is not None and before_id is not None:
            raise ApiError(400, "after_id and before_id exclude each other; send one of them", param="before_id")
        cursor = before_id or after_id
        first = None if cursor is None else await self._find(cursor, request)
        order: Order = "desc" if before_id is None else "asc"
        listed = await self._batches.page(
            scope_of(request).caller.only_owner, first, limit + 1, order, of_messages=True
        )
        told = page([shown(batch) for batch in listed], limit)
        if before_id is not None:
            told |= {"data": told["data"][::-1], "first_id": told["last_id"], "last_id": told["first_id"]}
        del told["object"]
        return told

    async def get(self, batch_id: str, request: Request) -> Json:
        return shown(await self._find(batch_id, request))

    async def cancel(self, batch_id: str, request: Request) -> Json:
        return shown(await self._runner.cancel(await self._find(batch_id, request)))

    async def results(self, batch_id: str, request: Request) -> Response:
        batch = await self._find(batch_id, request)
        if batch.is_active:
            raise ApiError(404, f"the message batch {batch.id!r} has not ended, so it has no results yet")
        for file_id in _answers(batch):
            if await self._files.get(file_id, batch.owner) is None:
                raise ApiError(404, f"the results of the message batch {batch.id!r} were deleted or have expired")
        return StreamingResponse(_results(self._files, batch), media_type=_RESULTS)

    async def delete(self, batch_id: str, request: Request) -> Json:
        batch = await self._find(batch_id, request)
        if batch.is_active:
            raise ApiError(409, f"the message batch {batch.id!r} has not ended; cancel it first", param="batch_id")
        await self._batches.delete(batch.id)
        for file_id in (batch.input_file_id, *_answers(batch)):
            with contextlib.suppress(MissingFileError):
                await self._files.delete(file_id, self._batches.unused(file_id))
        return {"id": batch.id, "type": "message_batch_deleted"}


def shown(batch: Batch) -> Json:
    """Return a batch as the JSON object of Anthropic's API. Lines count as processing until the batch has ended."""
    ended = not batch.is_active
    left = batch.total - batch.completed - batch.failed
    counts = {
        "processing": 0,
        "succeeded": batch.completed,
        "errored": batch.failed - batch.unanswered + (left if batch.status == "failed" else 0),
        "canceled": left if batch.status == "cancelled" else 0,
        "expired": batch.unanswered,
    }
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": counts if ended else {**dict.fromkeys(counts, 0), "processing": batch.total},
        "created_at": _instant(batch.created),
        "expires_at": _instant(batch.expires),
        "ended_at": _instant(batch.times[batch.status]) if ended else None,
        "cancel_initiated_at": _instant(batch.times.get("cancelling")),
        "archived_at": None,
        # Without a host, so that a client sends its key to no other address than the one that it has.
        "results_url": f"{PATH}/{batch.id}/results" if ended else None,
    }


def result_of(answer: Json) -> Json:
    """Return Anthropic's result for a line of a file of answers."""
    response, error = answer["response"], answer["error"]
    if response is None:
        told: Json = {"type": "expired"}
        if error["code"] != "batch_expired":
            told = {"type": "errored", "error": messages_error_body(500, error["message"], "")}
    elif response["status_code"] == 200:
        told = {"type": "succeeded", "message": response["body"]}
    else:
        body = response["body"]
        if body.get("type") != "error":  # the line was refused before it came to the Messages API
            body = messages_error_body(response["status_code"], body["error"]["message"], response["request_id"])
        told = {"type": "errored", "error": body}
    return {"custom_id": answer["custom_id"], "result": told}


async def _results(files: FileStore, batch: Batch) -> AsyncIterator[bytes]:
    """Yield the lines of a batch's results as JSON."""
    told: set[str] = set()
    for file_id in _answers(batch):
        async for line in _lines(files, file_id):
            told.add(line["custom_id"])
            yield _written(result_of(line))
    if len(told) < batch.total and batch.status in ("cancelled", "failed"):
        end: Json = {"type": "canceled"}
        if batch.status == "failed":
            reason = "; ".join(error.message for error in batch.errors) or "the batch failed"
            end = {"type": "errored", "error": messages_error_body(500, reason, "")}
        async for line in _lines(files, batch.input_file_id):
            if line["custom_id"] not in told:
                yield _written({"custom_id": line["custom_id"], "result": end})


async def _lines(files: FileStore, file_id: str) -> AsyncIterator[Json]:
    """Yield the JSON of a file's lines. Raises MissingFileError at the end if the file was deleted meanwhile.

    The error breaks the response off, which a client notices. It could not notice missing results, because their number
    is not announced.
    """
    async for _, line in split_lines(files.content(file_id), 1 << 40):
        yield json.loads(line)
    if await files.get(file_id, None) is None:
        raise MissingFileError(f"the file {file_id!r} was deleted while it was read", "batch_id")


async def _write(files: FileStore, file: File, chunks: list[bytes], file_id: str) -> File:
    """Write the input file of a batch. Raises QuotaError and OtherFileError."""
    await files.begin(file)
    try:
        for number, chunk in enumerate(chunks):
            await files.append(file, number, chunk)
        return await files.finish(file, as_id=file_id)
    except BaseException:
        with contextlib.suppress(Exception):
            await files.discard(file.id)
        raise


def _chunks(body: CreateMessageBatch) -> Iterator[bytes]:
    content = bytearray()
    for each in body.requests:
        content += _written({"custom_id": each.custom_id, "method": "POST", "url": ENDPOINT, "body": each.params})
        if len(content) >= CHUNK_BYTES:
            yield bytes(content)
            content.clear()
    if content:
        yield bytes(content)


def _check(body: CreateMessageBatch, most: int) -> None:
    """Raise ApiError if a batch cannot have these requests. Faults of `params` appear in the results instead."""
    if len(body.requests) > most:
        raise ApiError(400, f"requests: a batch may have {most} requests (--max-batch-lines)", param="requests")
    seen: set[str] = set()
    for index, each in enumerate(body.requests):
        place = f"requests[{index}]"
        if each.custom_id in seen:
            raise ApiError(400, f"{place}.custom_id: an earlier request has it, too", param=f"{place}.custom_id")
        seen.add(each.custom_id)


def _answers(batch: Batch) -> list[str]:
    return [file for file in (batch.output_file_id, batch.error_file_id) if file]


def _instant(seconds: float | None) -> str | None:
    """Return an instant, in seconds since the epoch, in the form of RFC 3339; None for None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _written(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
