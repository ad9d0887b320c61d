"""Bodies of requests and answers of files and batches, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from paceline.services.gateway.api.api_schema import AnswerBody
from paceline.services.gateway.api.batches.batch import Status
from paceline.services.gateway.planning.request_body import FailFast

Json = dict[str, Any]

LEAST_FILE_SECONDS = 3600
MOST_FILE_SECONDS = 30 * 86400


class ExpiresAfter(FailFast):
    """A client's wish when a file expires."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_FILE_SECONDS, le=MOST_FILE_SECONDS)


class CreateBatch(FailFast):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="ignore")

    input_file_id: Annotated[str, StringConstraints(max_length=64)]
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class FileBody(AnswerBody):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class DeletedFile(AnswerBody):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileList(AnswerBody):
    object: Literal["list"]
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchCounts(AnswerBody):
    total: int
    completed: int
    failed: int


class BatchBody(AnswerBody):
    """A batch in an answer. Times are seconds since the epoch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: Json | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(AnswerBody):
    object: Literal["list"]
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchedMessage(FailFast):
    """One request of a message batch."""

    model_config = ConfigDict(extra="ignore")

    custom_id: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: Json
    """The body of POST /v1/messages."""


class CreateMessageBatch(FailFast):
    """The body of POST /v1/messages/batches."""

    model_config = ConfigDict(extra="ignore")

    requests: Annotated[list[BatchedMessage], Field(min_length=1)]


class MessageBatchCounts(AnswerBody):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatchBody(AnswerBody):
    """A message batch in an answer. Times are in the form of RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None
    """Path of the results, below the address of the API; None until the batch has ended."""


class MessageBatchList(AnswerBody):
    data: list[MessageBatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(AnswerBody):
    id: str
    type: Literal["message_batch_deleted"]


def page(entries: list[Json], limit: int) -> Json:
    """Return the JSON object for a page of a list.

    Args:
        entries: at most `limit` entries, and one more if there is a next page.
    """
    shown = entries[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(entries) > limit}
