"""The routes of the Responses API."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from paceline.core.options import parse_bytes
from paceline.services.common.lifecycle import unique_name
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.batches.pages import Order
from paceline.services.gateway.api.chat_planning import plan_with_media
from paceline.services.gateway.api.respond import choose_id, start
from paceline.services.gateway.api.responses.bodies import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseBody,
    ResponseEvent,
)
from paceline.services.gateway.api.responses.builder import ResponseBuilder, check_echo, echo_of
from paceline.services.gateway.api.responses.conversation_store import ConversationStore
from paceline.services.gateway.api.responses.conversations import add_conversations
from paceline.services.gateway.api.responses.item_pages import page_of
from paceline.services.gateway.api.responses.items import InputItem
from paceline.services.gateway.api.responses.kept import KeptResponses, stored_input
from paceline.services.gateway.api.responses.planning import chat_request, in_client_fields, plan_response
from paceline.services.gateway.api.responses.runs import (
    BackgroundRun,
    BackgroundRuns,
    ResponseWriter,
    response_events,
    whole_response,
)
from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.api.responses.store import Record, ResponseStore
from paceline.services.gateway.api.responses.tools import Toolbox
from paceline.services.gateway.api.resume import HEADER
from paceline.services.gateway.api.tokens.bodies import RenderedRequest
from paceline.services.gateway.api.tokens.render_api import check_no_media, render
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import EventStreamResponse, event, until_disconnect
from paceline.services.gateway.http.request_scope import IDEMPOTENCY_KEY, aside, id_of_made, key_was_used, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.cache_hints import STORED
from paceline.services.gateway.planning.chat_prompt import media_of
from paceline.services.gateway.planning.media.items import NO_ITEMS, NOTHING, Expansions
from paceline.services.gateway.planning.media.parts import pin_meanings
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.store.store import Store

Json = dict[str, Any]


def add_responses(router: APIRouter, gateway: Gateway, shared: Store | None) -> BackgroundRuns | None:
    """Add the routes of responses. Return the background runs, which the caller closes; None if nothing is kept.

    Args:
        shared: the database for responses and conversations; None if nothing is kept.
    """
    config = gateway.config
    store = conversations = runs = None
    if shared is not None:
        limits: Any = {
            "entries": config.stored_responses,
            "max_bytes": parse_bytes(config.stored_responses_size),
            "seconds": config.stored_responses_seconds,
        }
        store, conversations = ResponseStore(shared, **limits), ConversationStore(shared, **limits)
        runs = BackgroundRuns(store, unique_name("gateway"))
    kept = KeptResponses(store, conversations, parse_bytes(config.max_conversation_size), config.max_messages)
    add_conversations(router, conversations)
    api = ResponsesApi(gateway, kept, runs)
    router.post("/v1/responses", response_model=None, responses=answers(ResponseBody, chunk=ResponseEvent))(api.respond)
    router.post("/v1/responses/input_tokens", response_model=None, responses=answers(InputTokens))(api.count)
    router.post("/v1/responses/render", response_model=None, responses=answers(RenderedRequest))(api.render_response)
    router.get(
        "/v1/responses/{response_id}", response_model=None, responses=answers(ResponseBody, chunk=ResponseEvent)
    )(api.retrieve)
    router.delete("/v1/responses/{response_id}", response_model=None, responses=answers(DeletedResponse))(api.delete)
    router.post("/v1/responses/{response_id}/cancel", response_model=None, responses=answers(ResponseBody))(api.cancel)
    router.get("/v1/responses/{response_id}/input_items", response_model=None, responses=answers(InputItems))(
        api.input_items
    )
    return runs


class Prepared(NamedTuple):
    """A request that has been planned."""

    items: list[InputItem]
    """All items of the conversation, the request's input included."""
    toolbox: Toolbox
    plan: Plan


class ResponsesApi:
    """The routes of responses.

    Args:
        runs: the responses that are computed in the background; None if nothing is kept.
    """

    def __init__(self, gateway: Gateway, kept: KeptResponses, runs: BackgroundRuns | None) -> None:
        self._gateway = gateway
        self._kept = kept
        self._runs = runs

    async def respond(self, body: ResponsesRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        choose_id(body.request_id, request)
        if body.background and self._runs is None:
            message = "background: this server keeps no responses; start it with --store"
            raise ApiError(400, message, param="background")
        if body.stream and HEADER in request.headers:
            message = f"{HEADER}: streams of responses cannot be continued, because each has an id of its own"
            raise ApiError(400, message, param=HEADER)
        owner = scope_of(request).owner
        items, toolbox, plan = await self._prepare(model, body, request)
        is_stored = body.store and self._kept.store is not None
        response_id = _response_id(request, body)
        is_kept = is_stored or body.conversation is not None
        given = items[len(items) - len(body.input_items) :] if is_kept else []
        kept_input = await aside(request, stored_input, response_id, given)
        if body.background and (known := await self._kept.find(response_id, owner)) is not None:
            return _again(known, body, model.name, kept_input, self._runs)
        generation = await start(model, plan, request, bool(body.stream))
        builder = ResponseBuilder(
            response_id, body, toolbox, model.name, model.tokenizer, generation, is_stored=is_stored
        )
        if body.background and self._runs is not None:
            queued = dict(builder.response)
            growth = partial(self._kept.growth, owner=owner, items=kept_input)
            run = await self._runs.start(generation, builder, owner, kept_input, growth)
            return _follow(run, 0) if body.stream else JSONResponse(queued)

        async def keep(response: Json) -> None:
            if is_kept:
                await self._kept.put(response, owner, kept_input, is_stored)

        if body.stream:
            writer = ResponseWriter(builder)
            return EventStreamResponse(response_events(generation, builder, writer, keep), writer.error)
        response = await until_disconnect(request.receive, whole_response(generation, builder))
        await keep(response)
        return await aside(request, JSONResponse, response)

    async def count(self, body: ResponsesRequest, request: Request) -> Json:
        model = self._gateway.pick(body.model)
        *_, plan = await self._prepare(model, body, request)
        return {"object": "response.input_tokens", "input_tokens": len(plan.prompts[0].token_ids)}

    async def render_response(self, body: ResponsesRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        items, toolbox, plan = await self._prepare(model, body, request)
        with in_client_fields():
            chat = await aside(request, chat_request, body, toolbox, items)
            check_no_media(chat, model)
        return await aside(request, lambda: JSONResponse(render(chat, plan, request_id, model.name)[0]))

    async def retrieve(
        self,
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        record = await self._kept.get(response_id, scope_of(request).owner, scope_of(request).memory)
        if not stream:
            return await aside(request, JSONResponse, record.response)
        run = self._runs.find(response_id) if self._runs is not None else None
        if run is None:
            message = "stream: the events of this response are not kept; get it without stream"
            raise ApiError(400, message, param="stream")
        return _follow(run, starting_after + 1)

    async def delete(self, response_id: str, request: Request) -> Json:
        await self._kept.delete(response_id, scope_of(request).owner)
        if self._runs is not None:
            await self._runs.cancel(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, response_id: str, request: Request) -> Response:
        owner, memory = scope_of(request).owner, scope_of(request).memory
        record = await self._kept.get(response_id, owner, memory)
        if not record.response["background"]:
            message = "only responses with background true can be cancelled"
            raise ApiError(400, message, param="response_id")
        if record.is_running and self._runs is not None and self._kept.store is not None:
            await self._runs.cancel(response_id)
            # If another gateway computes it, that one notices.
            await self._kept.store.finish({**record.response, "status": "cancelled"})
        record = await self._kept.get(response_id, owner, memory)
        return await aside(request, JSONResponse, record.response)

    async def input_items(
        self,
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
        after: str | None = None,
    ) -> Response:
        owner, memory = scope_of(request).owner, scope_of(request).memory
        record = await self._kept.get(response_id, owner, memory)
        items: list[Json] = []
        if record.previous_id:
            for turn in await self._kept.turns(record.previous_id, owner, memory):
                items += [*turn.input, *turn.response["output"]]
        items += record.input
        return await aside(request, lambda: JSONResponse(page_of(items, order, limit, after)))

    async def _prepare(self, model: ModelFleet, body: ResponsesRequest, request: Request) -> Prepared:
        scope = scope_of(request)
        items = await self._kept.conversation(body, scope.owner, scope.memory, partial(aside, request))
        await aside(request, check_echo, body)
        toolbox = await aside(request, Toolbox, body, items)

        truncates = body.truncation == "auto"
        shown: Sequence[InputItem] = items
        loaded: Expansions = NO_ITEMS

        def plan(served: ServedModel, media: Expansions) -> Plan:
            nonlocal loaded
            loaded = media
            return plan_response(body, toolbox, shown, served, media)[0]

        with in_client_fields():
            chat = await aside(request, chat_request, body, toolbox, shown)
            if truncates and media_of(chat.messages, model.tokenizer):
                # Media of items that do not fit even as text are not loaded.
                served = await model.served_model(request)
                _, shown = await aside(request, plan_response, body, toolbox, items, served, NOTHING)
                chat = await aside(request, chat_request, body, toolbox, shown)
            planned = await plan_with_media(model, [chat], request, plan, "input", keeps_newest=truncates)
        pin_meanings(body.input, loaded)
        if (body.store or body.conversation is not None) and self._kept.store is not None and planned.learnt is None:
            planned = dataclasses.replace(planned, learnt=STORED)
        return Prepared(items, toolbox, planned)


def _follow(run: BackgroundRun, first: int) -> Response:
    """Return the stream of a background response's events from index `first` on. The run outlasts the stream."""
    return EventStreamResponse(run.read(first), lambda error: event(error.body, "error"))


def _again(
    known: Record, body: ResponsesRequest, model: str, items: list[Json], runs: BackgroundRuns | None
) -> Response:
    """Answer a request for a background response that an earlier try of the request has begun. Raises ApiError."""
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    asked = {"model": model, **echo_of(body), **given}
    if known.input != items or any(known.response[name] != value for name, value in asked.items()):
        raise key_was_used(f"the response {known.id!r}")
    if not body.stream:
        return JSONResponse(known.response)
    if (run := runs.find(known.id) if runs is not None else None) is None:
        message = f"an earlier request with this key has begun the response {known.id!r}; get it without stream"
        raise ApiError(409, message, param="stream")
    return _follow(run, 0)


def _response_id(request: Request, body: ResponsesRequest) -> str:
    """Return the id of a new response: the request's own id, or a random one if the client chose the request's id.

    The id of a background response follows from the request's Idempotency-Key, if there is one, so that a repeated
    request finds the response. Raises ApiError if this header is not valid.
    """
    if body.background and IDEMPOTENCY_KEY in request.headers:
        return f"resp_{id_of_made(request)}"
    return f"resp_{uuid.uuid4().hex}" if scope_of(request).client_chose_id else str(scope_of(request).id)
