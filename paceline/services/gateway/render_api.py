"""The steps before and after inference alone: render turns a request into token ids, derender turns ids into an answer.

A router renders a request, sends the result to /inference/v1/generate, and derenders what comes back.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from paceline.services.gateway.api_schema import answers
from paceline.services.gateway.chat_prompt import media_of
from paceline.services.gateway.derender import (
    derender_chat,
    derender_chat_event,
    derender_completion,
    derender_completion_event,
)
from paceline.services.gateway.errors import ApiError
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.media.expansion import NOTHING
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning import plan_chat, plan_completion
from paceline.services.gateway.render import render
from paceline.services.gateway.respond import choose_id
from paceline.services.gateway.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.token_schemas import (
    DerenderChat,
    DerenderChatStream,
    DerenderCompletion,
    DerenderCompletionStream,
    DerenderStream,
)
from paceline.services.gateway.vllm_bodies import (
    DerenderedChat,
    DerenderedChatEvent,
    DerenderedCompletion,
    DerenderedCompletionEvent,
    RenderedRequest,
)


def check_no_media(chat: ChatRequest, model: ModelFleet) -> None:
    """Raise ApiError if a chat that shall be rendered has media."""
    if media_of(chat.messages, model.tokenizer):
        message = "messages: a rendered request is token ids, which cannot have images, videos or audio"
        raise ApiError(400, f"{message}; send them to the route that answers", param="messages")


def add_render_api(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes that render requests and derender answers to a router."""

    @router.post("/v1/completions/render", response_model=None, responses=answers(list[RenderedRequest]))
    async def render_completion(body: CompletionRequest, request: Request) -> list[dict[str, Any]]:
        model = gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        if body.max_tokens == 0:
            raise ApiError(400, "max_tokens must be at least 1 in a request that is rendered", param="max_tokens")
        plan = await model.plan(request, lambda served: plan_completion(body, served))
        return render(body, plan, request_id, model.name)

    @router.post("/v1/chat/completions/render", response_model=None, responses=answers(RenderedRequest))
    async def render_chat(body: ChatRequest, request: Request) -> dict[str, Any]:
        model = gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        check_no_media(body, model)
        plan = await model.plan(request, lambda served: plan_chat(body, served))
        return render(body, plan, request_id, model.name)[0]

    @router.post(
        "/v1/completions/derender",
        response_model=None,
        responses=answers(DerenderedCompletion | DerenderedCompletionEvent),
    )
    async def completion(body: DerenderCompletion, request: Request) -> dict[str, Any]:
        model = gateway.pick(body.model)
        if isinstance(body, DerenderStream):
            body.check_ids(model.tokenizer.vocab_size)
            own_id = body.generate_chunk.request_id
        else:
            for index, answer in enumerate(body.generate_responses):
                answer.check_ids(model.tokenizer.vocab_size, f"generate_responses[{index}]")
            own_id = body.generate_responses[0].request_id
        plan = None
        if (completion_request := body.completion_request) is not None:
            plan = await model.plan(request, lambda served: plan_completion(completion_request, served))
        about = plan, own_id or request.state.request_id, model.name, model.tokenizer
        if isinstance(body, DerenderCompletionStream):
            return await asyncio.to_thread(derender_completion_event, body, *about)
        return await asyncio.to_thread(derender_completion, body, *about)

    @router.post(
        "/v1/chat/completions/derender", response_model=None, responses=answers(DerenderedChat | DerenderedChatEvent)
    )
    async def chat(body: DerenderChat, request: Request) -> dict[str, Any]:
        model = gateway.pick(body.model)
        if isinstance(body, DerenderStream):
            body.check_ids(model.tokenizer.vocab_size)
            own_id = body.generate_chunk.request_id
        else:
            body.generate_response.check_ids(model.tokenizer.vocab_size, "generate_response")
            own_id = body.generate_response.request_id
        plan = None
        if (chat_request := body.chat_request) is not None:
            # Only how answers are read matters here, not the prompt.
            plan = await model.plan(request, lambda served: plan_chat(chat_request, served, NOTHING))
        about = plan, own_id or request.state.request_id, model.name, model.tokenizer
        if isinstance(body, DerenderChatStream):
            return await asyncio.to_thread(derender_chat_event, body, *about)
        return await asyncio.to_thread(derender_chat, body, *about)
