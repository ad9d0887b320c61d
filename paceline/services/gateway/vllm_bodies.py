"""Bodies of answers of vLLM's additions to the OpenAI API, as `/openapi.json` shows them.

The routes send plain JSON. A test compares it with these classes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from paceline.services.gateway.api_bodies import (
    AboutPrompt,
    ChatChoice,
    ChatFinishReason,
    ChatLogprobs,
    CompletionChoice,
    FinishReason,
    Head,
    Json,
    Usage,
)


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class BatchChoice(ChatChoice, AboutPrompt):
    """The answer to one conversation."""


class ChatBatch(Head):
    object: Literal["chat.completion"]
    choices: list[BatchChoice]
    usage: Usage


class IdLogprob(BaseModel):
    token_id: int
    logprob: float
    rank: int


class TokenIdLogprob(IdLogprob):
    top_logprobs: list[IdLogprob]


class TokenIdLogprobs(BaseModel):
    content: list[TokenIdLogprob]


class TokensChoice(BaseModel):
    index: int
    token_ids: list[int]
    text: str = ""
    logprobs: TokenIdLogprobs | ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class TokensHead(BaseModel):
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


class RenderedRequest(BaseModel):
    """A body for POST /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    features: None
    sampling_params: Json
    model: str
    stream: bool
    stream_options: Json | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class PlainUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class Scores(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class DocumentText(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: DocumentText | None = None


class Ranking(BaseModel):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage
