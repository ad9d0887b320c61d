"""The bodies of answers as `/openapi.json` shows them. The routes send plain JSON; a test compares it with this.

Errors are the same for all routes: `create_app` adds them. A route names the body of its success:

    @router.get("/version", response_model=None, responses=answers(Version))
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"

Json = dict[str, Any]
Responses = dict[int | str, Json]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    """Path of the field that is wrong."""
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


ERRORS: Responses = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong, or it may not be served"},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve the request"},
}
"""Answers that every route may give."""

TEXT: Responses = {200: {"description": "Success", "content": {"text/plain": {"schema": {"type": "string"}}}}}
"""The `responses` of a route that succeeds with a text."""


def answers(body: type[BaseModel], *, chunk: type[BaseModel] | None = None) -> Responses:
    """Return the `responses` of a route that succeeds with 200.

    Args:
        body: the JSON body.
        chunk: the JSON in the data of each event, if the answer can be streamed. `add_chunks` must know it.
    """
    described: Json = {"model": body, "description": "Success"}
    if chunk is not None:
        described["description"] += "; a stream ends with the data `[DONE]`, and an error is an ErrorBody in its data"
        described["content"] = {"text/event-stream": {"schema": {"$ref": _REFERENCE.format(model=chunk.__name__)}}}
    return {200: described}


def add_chunks(app: FastAPI) -> None:
    """Add the bodies of streamed events to the schema of an application, which knows only whole bodies."""
    make = app.openapi

    def openapi() -> Json:
        schema = make()
        _, described = models_json_schema(
            [(CompletionChunk, "serialization"), (ChatChunk, "serialization")], ref_template=_REFERENCE
        )
        schema["components"]["schemas"] |= described["$defs"]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Json]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


class AboutPrompt(BaseModel):
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Head(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None


class CompletionChoice(AboutPrompt):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"]
    stop_reason: int | str | None
    token_ids: list[int] | None


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"] | None
    stop_reason: int | str | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionChunk(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str
    """JSON text."""


class CalledTool(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[CalledTool] = []


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"]
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(Head, AboutPrompt):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(BaseModel):
    name: str = ""
    arguments: str


class ToolDelta(BaseModel):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class MessageDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolDelta] = []


class ChatChunkChoice(BaseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] = []


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class ServerInfo(BaseModel):
    version: str
    model: str
    max_model_len: int
    started: int
    members: dict[str, int]
    """Number of services that can be reached, by role."""
    options: Json


class Load(BaseModel):
    server_load: int
    """Requests that wait or run."""


class FleetWorker(BaseModel):
    worker_id: str
    role: str
    epoch: int
    address: str
    host_id: str
    state: str
    model: str
    max_model_len: int
    max_seqs: int
    numerics: str | None
    running: int
    waiting: int
    in_flight: int
    stats: dict[str, float]


class LeaseKey(BaseModel):
    request_id: str
    attempt: int
    generation: int


class Lease(BaseModel):
    key: LeaseKey
    state: str
    owner: str
    writer: str
    blocks: int
    blocks_by_group: dict[str, int]
    shared_blocks: int
    filled_tokens: int
    token_count: int
    age_ms: int
    expires_in_ms: int


class FleetHost(BaseModel):
    worker_id: str
    address: str
    host_id: str


class SilentHost(FleetHost):
    error: str
    """Why there is no ledger."""


class HostLedger(FleetHost):
    hit_rate: float | None
    total: int
    free: int
    held: int
    in_flight: int
    cached: int
    balanced: bool
    expired_leases: int
    evicted_blocks: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    slot_bytes: int
    leases_left_out: int
    blocks_left_out: int
    blocks_of_leases: int
    adds_up: bool
    leases: list[Lease]


class FleetState(BaseModel):
    workers: list[FleetWorker]
    hosts: list[HostLedger | SilentHost]
    waiting: int


class Trace(BaseModel):
    request_id: str
    own_id: str
    session_id: str | None
    earlier: list[str]
    state: Literal["running", "finished", "failed", "client gone"]
    arrived: datetime
    ms: float
    endpoint: str
    streamed: bool
    asked: Json
    sequences: int
    parts: list[Json]
    parts_left_out: int


class RoleState(BaseModel):
    wanted: int
    ready: int
    draining: int


class Scale(BaseModel):
    prefill: RoleState
    decode: RoleState
