"""Bodies of answers of the Messages API, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from paceline.services.gateway.api.api_schema import AnswerBody, errors_of


class ThinkingTokens(AnswerBody):
    thinking_tokens: int


class MessageUsage(AnswerBody):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class ContentBlock(AnswerBody):
    """A content block: text, thinking, or a tool call. It has the fields of its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}


class AnsweredMessage(AnswerBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(AnswerBody):
    """An event of a message's stream. It has the fields of its type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class TokenCount(AnswerBody):
    input_tokens: int


class MessageErrorDetail(AnswerBody):
    type: str
    message: str


class MessageError(AnswerBody):
    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


MESSAGE_ERRORS = errors_of(MessageError)
"""FastAPI's `responses` for the errors that every route of the Messages API may give."""
