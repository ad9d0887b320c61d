"""Bodies of answers of the routes that vLLM adds to the OpenAI API, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Any, Literal

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


class DerenderState(AnswerBody):
    output_token_ids: list[int]
    output_chunk_lens: list[int]
    last_tool_call_ids: list[str]
    role_sent: bool


class DerenderedCompletionEvent(AnswerBody):
    chunk: CompletionChunk
    stream_state: DerenderState


class DerenderedChatEvent(AnswerBody):
    chunk: ChatChunk
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
