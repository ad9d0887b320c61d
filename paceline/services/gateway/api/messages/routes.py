"""Anthropic's Messages API: POST /v1/messages, and its render and count_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.chat_planning import encode_conversation, plan_conversation
from paceline.services.gateway.api.messages.answer import MessageFormat, MessageWriter
from paceline.services.gateway.api.messages.bodies import MESSAGE_ERRORS, AnsweredMessage, MessageEvent, TokenCount
from paceline.services.gateway.api.messages.conversion import chat_fields, chat_request
from paceline.services.gateway.api.messages.schemas import CountRequest, MessagesRequest
from paceline.services.gateway.api.respond import start, stream, whole
from paceline.services.gateway.api.tokens.bodies import RenderedRequest
from paceline.services.gateway.api.tokens.render_api import check_no_media, render
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError, ContextLengthError
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.plan import Plan


def add_messages(router: APIRouter, gateway: Gateway) -> None:
    """Add the Messages API to a router. Query parameters and the headers for versions of the API are ignored."""
    api = MessagesApi(gateway)
    router.post(
        "/v1/messages", response_model=None, responses=answers(AnsweredMessage, chunk=MessageEvent) | MESSAGE_ERRORS
    )(api.create_message)
    router.post("/v1/messages/render", response_model=None, responses=answers(RenderedRequest) | MESSAGE_ERRORS)(
        api.render_message
    )
    router.post("/v1/messages/count_tokens", response_model=None, responses=answers(TokenCount) | MESSAGE_ERRORS)(
        api.count_tokens
    )


class MessagesApi:
    """The Messages API."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create_message(self, body: MessagesRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        plan = await _plan(model, body, request)
        generation = await start(model, plan, request, body.stream, body if body.stream else None)
        shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        message_format = MessageFormat(scope_of(request).id, model.name, shows_thinking)
        if body.stream:
            writer = MessageWriter(message_format, generation.usage)
            return stream(generation, writer, writer.ping)
        return await whole(generation, request, message_format.whole)

    async def render_message(self, body: MessagesRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        chat = await aside(request, chat_request, body, model.forms)
        check_no_media(chat, model)
        plan = await _plan(model, body, request)
        request_id = scope_of(request).id
        return await aside(request, lambda: JSONResponse(render(chat, plan, request_id, model.name)[0]))

    async def count_tokens(self, body: CountRequest, request: Request) -> dict[str, Any]:
        model = self._gateway.pick(body.model)
        prompt = await encode_conversation(model, await aside(request, chat_fields, body), request)
        return {"input_tokens": len(prompt.token_ids)}


async def _plan(model: ModelFleet, body: MessagesRequest, request: Request) -> Plan:
    """Return the plan of a request. Raises ApiError and the errors of `plan_conversation`."""
    chat = await aside(request, chat_request, body, model.forms)
    try:
        return await plan_conversation(model, chat, request)
    except ContextLengthError as error:
        # Clients search for these words: after the first message they shorten the conversation, after the second one
        # they lower max_tokens.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_model_len} maximum"
        if error.prompt_tokens < error.max_model_len:
            message = (
                f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {body.max_tokens} > "
                f"{error.max_model_len}, decrease input length or `max_tokens` and try again"
            )
        raise ApiError(400, message) from error
