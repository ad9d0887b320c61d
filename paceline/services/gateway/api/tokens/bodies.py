"""Bodies of answers of the routes that vLLM adds to the OpenAI API, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from paceline.services.gateway.api.api_schema import AnswerBody
from paceline.services.gateway.api.openai.bodies import (
    AboutPrompt,
    ChatChoice,
    ChatChunk,
    ChatFinishReason,
    ChatLogprobs,
    CompletionChoice,
    CompletionChunk,
    CompletionTokensDetails,
    FinishReason,
    Head,
    Usage,
)

Json = dict[str, Any]


class IdLogprob(AnswerBody):
    token_id: int
    logprob: float
    rank: int


class TokenIdLogprob(IdLogprob):
    top_logprobs: list[IdLogprob]


class TokenIdLogprobs(AnswerBody):
    content: list[TokenIdLogprob]


class TokensChoice(AnswerBody):
    index: int
    token_ids: list[int]
    text: str = ""
    logprobs: TokenIdLogprobs | ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class TokensHead(AnswerBody):
    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]


class GeneratedTokens(TokensHead, AboutPrompt):
    choices: list[TokensChoice]
    usage: Usage
    kv_transfer_params: None


class TokensChunk(TokensHead):
    choices: list[TokensChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


class RenderedRequest(AnswerBody):
    """A body for POST /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    token_offsets: list[tuple[int, int]] | None
    features: None
    sampling_params: Json
    model: str
    stream: bool
    stream_options: Json | None
    cache_salt: str | None
    kv_transfer_params: None
    priority: int = 0
    """Priority from the request; missing if the request has none."""


class PlainUsage(AnswerBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class DerenderedCompletionChoice(CompletionChoice):
    finish_reason: FinishReason | None  # type: ignore[assignment]


class DerenderedCompletion(Head):
    object: Literal["text_completion"]
    choices: list[DerenderedCompletionChoice]
    usage: PlainUsage


class DerenderedChatChoice(ChatChoice):
    finish_reason: ChatFinishReason | None  # type: ignore[assignment]


class DerenderedChat(Head, AboutPrompt):
    object: Literal["chat.completion"]
    choices: list[DerenderedChatChoice]
    usage: PlainUsage


class PendingAlternative(AnswerBody):
    token_id: int
    logprob: float
    rank: int | None


class PendingLogprob(PendingAlternative):
    top_logprobs: list[PendingAlternative]


class DerenderState(AnswerBody):
    output_token_ids: list[int]
    output_chunk_lens: list[int]
    pending_logprobs: list[PendingLogprob]
    last_tool_call_ids: list[str]
    role_sent: bool


class EventUsage(AnswerBody):
    """The usage of an event, with the further fields that the client has sent."""

    model_config = ConfigDict(extra="allow")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class DerenderedCompletionChunk(CompletionChunk):
    usage: EventUsage | None = None  # type: ignore[assignment]


class DerenderedChatChunk(ChatChunk):
    usage: EventUsage | None = None  # type: ignore[assignment]


class DerenderedCompletionEvent(AnswerBody):
    chunk: DerenderedCompletionChunk
    stream_state: DerenderState


class DerenderedChatEvent(AnswerBody):
    chunk: DerenderedChatChunk
    stream_state: DerenderState


class LabelScore(AnswerBody):
    index: int
    token_probs: dict[str, float]


class LabelScores(AnswerBody):
    id: str
    object: Literal["generative_score"]
    created: int
    model: str
    results: list[LabelScore]
    usage: Usage
