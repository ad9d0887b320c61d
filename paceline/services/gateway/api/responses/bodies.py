"""Bodies of answers of the Responses API, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from paceline.services.gateway.api.api_schema import AnswerBody

Json = dict[str, Any]


class ResponseBody(AnswerBody):
    """A response. It also repeats fields of its request."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    model: str
    output: list[Json]
    error: Json | None
    incomplete_details: Json | None
    usage: Json | None


class ResponseEvent(AnswerBody):
    """An event of a response's stream. It has the fields of its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class ConversationBody(AnswerBody):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(AnswerBody):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class Item(AnswerBody):
    """An item of a conversation or of a response. It has the fields of its type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class InputTokens(AnswerBody):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(AnswerBody):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(AnswerBody):
    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool
