"""The OpenAI endpoints, and vLLM's batches of chats in one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.chat_planning import plan_conversation, plan_with_media
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.openai.bodies import (
    ChatBatch,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    ModelCard,
    ModelList,
    Text,
    TokenizerInfo,
)
from paceline.services.gateway.api.openai.formats import ChatFormat, CompletionFormat
from paceline.services.gateway.api.respond import choose_id, respond, start, whole
from paceline.services.gateway.api.response_format import Json
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError, NoWorkerError
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.planning import kind_of, plan_chats, plan_completion
from paceline.services.gateway.planning.sampling import check_ids
from paceline.services.gateway.planning.schemas import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)

_ABOUT_PROMPT = ("prompt_logprobs", "prompt_token_ids")
"""Fields about one prompt. A chat has these fields next to `choices`, a batch of chats in each choice."""

Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


def add_openai(router: APIRouter, gateway: Gateway) -> None:
    """Add the OpenAI endpoints, `/tokenizer_info` and `/detokenize` to a router."""
    api = OpenAiApi(gateway)
    router.get("/v1/models", response_model=None, responses=answers(ModelList))(api.list_models)
    router.get("/v1/models/{model:path}", response_model=None, responses=answers(ModelCard))(api.get_model)
    router.post("/v1/completions", response_model=None, responses=answers(Completion, chunk=CompletionChunk))(
        api.complete
    )
    router.post("/v1/chat/completions", response_model=None, responses=answers(ChatCompletion, chunk=ChatChunk))(
        api.chat
    )
    router.get("/tokenizer_info", response_model=None, responses=answers(TokenizerInfo))(api.tokenizer_info)
    router.post("/detokenize", response_model=None, responses=answers(Text))(api.detokenize)


class OpenAiApi:
    """The OpenAI endpoints, `/tokenizer_info` and `/detokenize`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def _card(self, model: ModelFleet) -> dict[str, Any]:
        pooling = model.pooling
        base = None if model.adapter is None else self._gateway.base_of(model.name)
        return {
            "id": model.name,
            "object": "model",
            "created": self._gateway.started,
            "owned_by": "paceline",
            "root": model.name if base is None else base.name,
            "parent": None if base is None else base.name,
            "max_model_len": model.fleet.max_model_len(),
            "tasks": model.abilities,
            "permission": [],
            "embedding_dimensions": pooling.dim if pooling is not None and "embed" in pooling.tasks else None,
            "prompts": [] if pooling is None else [*pooling.prompts],
        }

    async def list_models(self) -> dict[str, Any]:
        # A model is listed once a worker has loaded it. It stays listed, because workers come and go.
        served = [model for model in self._gateway.models.values() if model.fleet.has_served.is_set()]
        adapted = [model.under(adapter) for model in served for adapter in model.adapters]
        return {"object": "list", "data": [self._card(model) for model in (*served, *adapted)]}

    async def get_model(self, model: str) -> dict[str, Any]:
        found = self._gateway.pick(model)
        if not found.fleet.has_served.is_set():
            raise NoWorkerError
        return self._card(found)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        response_id = choose_id(body.request_id, request)
        plan = await model.plan(request, lambda served: plan_completion(body, served), kind_of(body))
        plan = await model.constrained(plan, scope_of(request).owner)
        response_format = CompletionFormat(body, plan, response_id, model.name, model.tokenizer)
        return await respond(model, body, plan, response_format, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        response_id = choose_id(body.request_id, request)
        plan = await plan_conversation(model, body, request)
        response_format = ChatFormat(body, plan, response_id, model.name, model.tokenizer)
        return await respond(model, body, plan, response_format, request)

    async def tokenizer_info(self, model: str | None = None) -> dict[str, Any]:
        tokenizer = self._gateway.find(model).tokenizer
        template = {"chat_template": tokenizer.chat_template_source} if tokenizer.chat_template_source else {}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.settings, **template}

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)

        def decode() -> Response:
            check_ids(body.tokens, model.tokenizer.vocab_size, "tokens")
            return JSONResponse({"prompt": model.tokenizer.decode(body.tokens)})

        return await aside(request, decode)


class ChatBatchRequest(ChatRequest):
    """The body of POST /v1/chat/completions/batch: conversations in `messages`, and a chat's fields for all of them."""

    messages: Annotated[list[Conversation], Field(min_length=1, max_length=MAX_CHOICES)]  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check_batch(self) -> ChatBatchRequest:
        for name, is_wanted in (("stream", self.stream), ("tools", self.tools), ("n", self.n not in (None, 1))):
            if is_wanted:
                message = f"{name} is not supported in a batch; send each conversation to /v1/chat/completions"
                raise ApiError(400, message, param=name)
        return self

    def chats(self) -> list[ChatRequest]:
        """Return one request for each conversation."""
        shared = {name: getattr(self, name) for name in ChatRequest.model_fields}
        # The fields have been checked already.
        return [ChatRequest.model_construct(**{**shared, "messages": messages}) for messages in self.messages]


def add_chat_batch(router: APIRouter, gateway: Gateway) -> None:
    """Add the route POST /v1/chat/completions/batch to a router."""

    @router.post("/v1/chat/completions/batch", response_model=None, responses=answers(ChatBatch))
    async def batch(body: ChatBatchRequest, request: Request) -> Response:
        model = gateway.pick(body.model)
        response_id = choose_id(body.request_id, request)
        chats = body.chats()
        plan = await plan_with_media(model, chats, request, lambda served, media: plan_chats(chats, served, media))
        formats = [ChatFormat(chat, plan, response_id, model.name, model.tokenizer) for chat in chats]
        generation = await start(model, plan, request, is_streamed=False)
        return await whole(generation, request, lambda choices, usage: _join(formats, choices, usage))


def _join(formats: Sequence[ChatFormat], choices: Sequence[Delta], usage: Json) -> Json:
    """Return one chat completion with a choice for each conversation."""
    bodies = [each.whole([choice], usage) for each, choice in zip(formats, choices, strict=True)]
    joined = []
    for body in bodies:
        about_prompt = {name: body.pop(name) for name in _ABOUT_PROMPT}
        joined.append({**body["choices"][0], **about_prompt})
    return {**bodies[0], "choices": joined}
