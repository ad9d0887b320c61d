"""The steps before and after inference as routes: render turns a request into token ids, derender ids into an answer.

A router renders a request, sends the result to /inference/v1/generate, and derenders what comes back.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from paceline.core.grammar import expression_of
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.respond import choose_id
from paceline.services.gateway.api.tokens.bodies import (
    DerenderedChat,
    DerenderedChatEvent,
    DerenderedCompletion,
    DerenderedCompletionEvent,
    RenderedRequest,
)
from paceline.services.gateway.api.tokens.derender import (
    derender_chat,
    derender_chat_event,
    derender_completion,
    derender_completion_event,
)
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_prompt import media_of
from paceline.services.gateway.planning.media.items import NOTHING
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.planning.planning import plan_chat, plan_completion
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest, GenerationRequest
from paceline.services.gateway.planning.token_schemas import (
    OUTSIDE,
    DerenderChat,
    DerenderChatStream,
    DerenderCompletion,
    DerenderCompletionStream,
)

Json = dict[str, Any]

_RESOLVED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
)
"""Sampling parameters that a rendered request gets from the plan, because the client may have left them out."""

_LEFT_OUT = {
    *OUTSIDE,
    "best_of",
    "response_format",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "truncation_side",
    "user",
}
"""Fields of a request that a rendered request's sampling_params leave out: they are no sampling parameters, or the plan
has them in another form. Fields whose names begin with guided_ are left out, too."""


def render(request: GenerationRequest, plan: Plan, request_id: str, model: str) -> list[Json]:
    """Return one body for each prompt of a plan. All sampling parameters have the values that the plan has resolved."""
    return [
        {
            "request_id": request_id if len(plan.prompts) == 1 else f"{request_id}-{index}",
            "token_ids": prompt.token_ids,
            "token_offsets": prompt.offsets,
            "features": None,
            "sampling_params": _sampling_params(request, plan, prompt),
            "model": model,
            "stream": bool(request.stream),
            "stream_options": request.stream_options.model_dump() if request.stream_options else None,
            "cache_salt": request.cache_salt,
            "kv_transfer_params": None,
            # Without it, the priority of the key counts.
            **({} if request.priority is None else {"priority": request.priority}),
        }
        for index, prompt in enumerate(plan.prompts)
    ]


def _sampling_params(request: GenerationRequest, plan: Plan, prompt: PromptPlan) -> Json:
    kept = {name for name in GenerationRequest.model_fields.keys() - _LEFT_OUT if not name.startswith("guided_")}
    given = request.model_dump(include=kept, exclude_none=True)
    resolved = {name: getattr(prompt.sampling, name) for name in _RESOLVED}
    structured = _structured_outputs(prompt.sampling.constraint)
    return {**given, **resolved, "n": plan.n, "stop": list(plan.stop), "structured_outputs": structured}


def _structured_outputs(constraint: Constraint | None) -> Json | None:
    """Return a constraint as `structured_outputs`. Schemas become grammars, which also say where white space may be."""
    if constraint is None:
        return None
    match constraint.kind:
        case ConstraintKind.REGEX:
            return {"regex": constraint.text}
        case ConstraintKind.CHOICE:
            return {"choice": json.loads(constraint.text)}
        case ConstraintKind.JSON_SCHEMA:
            return {"grammar": f"start: {expression_of(constraint.kind, constraint.text)}"}
    return {"grammar": constraint.text}


def check_no_media(chat: ChatRequest, model: ModelFleet) -> None:
    """Raise ApiError if a chat has media, which a rendered request cannot have."""
    if media_of(chat.messages, model.tokenizer):
        message = "messages: a rendered request is token ids, which cannot have images, videos or audio"
        raise ApiError(400, f"{message}; send them to the route that answers", param="messages")


def add_render_api(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes that render requests and derender answers to a router."""
    api = RenderApi(gateway)
    router.post("/v1/completions/render", response_model=None, responses=answers(list[RenderedRequest]))(
        api.render_completion
    )
    router.post("/v1/chat/completions/render", response_model=None, responses=answers(RenderedRequest))(api.render_chat)
    router.post(
        "/v1/completions/derender",
        response_model=None,
        responses=answers(DerenderedCompletion | DerenderedCompletionEvent),
    )(api.completion)
    router.post(
        "/v1/chat/completions/derender", response_model=None, responses=answers(DerenderedChat | DerenderedChatEvent)
    )(api.chat)


class RenderApi:
    """The routes that render requests and derender answers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def render_completion(self, body: CompletionRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        if body.max_tokens == 0:
            raise ApiError(400, "max_tokens must be at least 1 in a request that is rendered", param="max_tokens")
        plan = await model.plan(request, lambda served: plan_completion(body, served))
        plan = await model.constrained(plan, scope_of(request).owner)
        return await aside(request, lambda: JSONResponse(render(body, plan, request_id, model.name)))

    async def render_chat(self, body: ChatRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        check_no_media(body, model)
        plan = await model.plan(request, lambda served: plan_chat(body, served))
        plan = await model.constrained(plan, scope_of(request).owner)
        return await aside(request, lambda: JSONResponse(render(body, plan, request_id, model.name)[0]))

    async def completion(self, body: DerenderCompletion, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        await aside(request, body.check, model.tokenizer.vocab_size, model.fleet.max_model_len())
        plan = None
        if (completion_request := body.completion_request) is not None:
            plan = await model.plan(request, lambda served: plan_completion(completion_request, served))
        about = plan, body.answer_id or scope_of(request).id, model.name, model.tokenizer
        if isinstance(body, DerenderCompletionStream):
            return await aside(request, lambda: JSONResponse(derender_completion_event(body, *about)))
        return await aside(request, lambda: JSONResponse(derender_completion(body, *about)))

    async def chat(self, body: DerenderChat, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        await aside(request, body.check, model.tokenizer.vocab_size, model.fleet.max_model_len())
        plan = None
        if (chat_request := body.chat_request) is not None:
            # Only how answers are read matters here, not the prompt.
            plan = await model.plan(request, lambda served: plan_chat(chat_request, served, NOTHING))
        about = plan, body.answer_id or scope_of(request).id, model.name, model.tokenizer
        if isinstance(body, DerenderChatStream):
            return await aside(request, lambda: JSONResponse(derender_chat_event(body, *about)))
        return await aside(request, lambda: JSONResponse(derender_chat(body, *about)))
