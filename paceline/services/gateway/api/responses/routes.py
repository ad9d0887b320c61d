"""The routes of the Responses API."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from paceline.core.options import parse_bytes
from paceline.services.common.lifecycle import unique_name
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.chat_planning import plan_with_media
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.generation import Generation
from paceline.services.gateway.api.respond import choose_id, start
from paceline.services.gateway.api.responses.background import BackgroundRun, BackgroundRuns, generate
from paceline.services.gateway.api.responses.bodies import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseBody,
    ResponseEvent,
)
from paceline.services.gateway.api.responses.builder import ResponseBuilder, check_echo, echo_of, encode
from paceline.services.gateway.api.responses.conversation_store import ConversationStore
from paceline.services.gateway.api.responses.conversations import add_conversations
from paceline.services.gateway.api.responses.items import InputItem
from paceline.services.gateway.api.responses.kept import KeptResponses, stored_input
from paceline.services.gateway.api.responses.planning import chat_request, in_client_fields, plan_response
from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.api.responses.store import Record, ResponseStore
from paceline.services.gateway.api.responses.tools import Toolbox
from paceline.services.gateway.api.resume import HEADER
from paceline.services.gateway.api.streaming import event_stream
from paceline.services.gateway.api.tokens.bodies import RenderedRequest
from paceline.services.gateway.api.tokens.render import render
from paceline.services.gateway.api.tokens.render_api import check_no_media
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError, to_api_error
from paceline.services.gateway.http.event_streams import EventStreamResponse, event, until_disconnect
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.cache_hints import STORED
from paceline.services.gateway.planning.chat_prompt import media_of
from paceline.services.gateway.planning.media.expansion import NO_ITEMS, NOTHING, Expansions
from paceline.services.gateway.planning.media.parts import pin_meanings
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.planning.request_headers import IDEMPOTENCY_KEY, id_of_made, key_was_used
from paceline.services.gateway.store.store import Store

Json = dict[str, Any]


def add_responses(router: APIRouter, gateway: Gateway, shared: Store | None) -> BackgroundRuns | None:
    """Add the routes. Return the runs in the background, which the caller closes; None if nothing is kept.

    Args:
        shared: where responses are kept; None if nothing is kept.
    """
    config = gateway.config
    store = conversations = None
    if shared is not None:
        limits: Any = {
            "entries": config.stored_responses,
            "max_bytes": parse_bytes(config.stored_responses_size),
            "seconds": config.stored_responses_seconds,
        }
        store, conversations = ResponseStore(shared, **limits), ConversationStore(shared, **limits)
    kept = KeptResponses(store, conversations, parse_bytes(config.max_conversation_size), config.max_messages)
    runs = BackgroundRuns(store, unique_name("gateway")) if store is not None else None

    add_conversations(router, conversations)

    async def prepare(
        model: ModelFleet, body: ResponsesRequest, request: Request
    ) -> tuple[list[InputItem], Toolbox, Plan]:
        """Return the whole conversation, its tools and its plan."""
        items = await kept.conversation(
            body, scope_of(request).owner, scope_of(request).memory, partial(aside, request)
        )
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
        if (body.store or body.conversation is not None) and store is not None and planned.learnt is None:
            planned = dataclasses.replace(planned, learnt=STORED)
        return items, toolbox, planned

    @router.post("/v1/responses", response_model=None, responses=answers(ResponseBody, chunk=ResponseEvent))
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        model = gateway.pick(body.model)
        choose_id(body.request_id, request)
        if body.background and runs is None:
            message = "background: this server keeps no responses; start it with --store"
            raise ApiError(400, message, param="background")
        if body.stream and HEADER in request.headers:
            message = f"{HEADER}: streams of responses cannot be continued, because each has an id of its own"
            raise ApiError(400, message, param=HEADER)
        owner = scope_of(request).owner
        items, toolbox, plan = await prepare(model, body, request)
        is_stored = body.store and store is not None
        response_id = _response_id(request, body)
        is_kept = is_stored or body.conversation is not None
        given = items[len(items) - len(body.input_items) :] if is_kept else []
        own = await aside(request, stored_input, response_id, given)
        if body.background and (known := await kept.find(response_id, owner)) is not None:
            return _again(known, body, model.name, own, runs)
        generation = await start(model, plan, request, bool(body.stream))
        builder = ResponseBuilder(
            response_id, body, toolbox, model.name, model.tokenizer, generation, is_stored=is_stored
        )
        if body.background and runs is not None:
            queued = dict(builder.response)
            run = await runs.start(generation, builder, owner, own, lambda response: kept.growth(response, owner, own))
            return _follow(run, 0) if body.stream else JSONResponse(queued)

        async def keep(response: Json) -> None:
            if is_kept:
                await kept.put(response, owner, own, is_stored)

        if body.stream:
            writer = ResponseWriter(builder)
            return EventStreamResponse(_events(generation, builder, writer, keep), writer.error)
        response = await until_disconnect(request.receive, _whole(generation, builder))
        await keep(response)
        return await aside(request, JSONResponse, response)

    @router.post("/v1/responses/input_tokens", response_model=None, responses=answers(InputTokens))
    async def count(body: ResponsesRequest, request: Request) -> Json:
        model = gateway.pick(body.model)
        *_, plan = await prepare(model, body, request)
        return {"object": "response.input_tokens", "input_tokens": len(plan.prompts[0].token_ids)}

    @router.post("/v1/responses/render", response_model=None, responses=answers(RenderedRequest))
    async def render_response(body: ResponsesRequest, request: Request) -> Response:
        model = gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        items, toolbox, plan = await prepare(model, body, request)
        with in_client_fields():
            chat = await aside(request, chat_request, body, toolbox, items)
            check_no_media(chat, model)
        return await aside(request, lambda: JSONResponse(render(chat, plan, request_id, model.name)[0]))

    @router.get(
        "/v1/responses/{response_id}", response_model=None, responses=answers(ResponseBody, chunk=ResponseEvent)
    )
    async def retrieve(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        record = await kept.get(response_id, scope_of(request).owner, scope_of(request).memory)
        if not stream:
            return await aside(request, JSONResponse, record.response)
        run = runs.find(response_id) if runs is not None else None
        if run is None:
            message = "stream: the events of this response are not kept; get it without stream"
            raise ApiError(400, message, param="stream")
        return _follow(run, starting_after + 1)

    @router.delete("/v1/responses/{response_id}", response_model=None, responses=answers(DeletedResponse))
    async def delete(response_id: str, request: Request) -> Json:
        await kept.delete(response_id, scope_of(request).owner)
        if runs is not None:
            await runs.cancel(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel", response_model=None, responses=answers(ResponseBody))
    async def cancel(response_id: str, request: Request) -> Response:
        owner = scope_of(request).owner
        record = await kept.get(response_id, owner, scope_of(request).memory)
        if not record.response["background"]:
            message = "only responses with background true can be cancelled"
            raise ApiError(400, message, param="response_id")
        if record.is_running and runs is not None and store is not None:
            await runs.cancel(response_id)
            # If another gateway computes it, that one notices.
            await store.finish({**record.response, "status": "cancelled"})
        record = await kept.get(response_id, owner, scope_of(request).memory)
        return await aside(request, JSONResponse, record.response)

    @router.get("/v1/responses/{response_id}/input_items", response_model=None, responses=answers(InputItems))
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        owner = scope_of(request).owner
        record = await kept.get(response_id, owner, scope_of(request).memory)
        items: list[Json] = []
        if record.previous_id:
            for turn in await kept.turns(record.previous_id, owner, scope_of(request).memory):
                items += [*turn.input, *turn.response["output"]]
        items += record.input
        ordered = items if order == "asc" else items[::-1]
        return await aside(request, lambda: JSONResponse(_page(ordered, limit, after)))

    return runs


class ResponseWriter:
    """The events of a response as a stream; see `StreamWriter`. `_events` adds the last ones."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._beginning = _encoded(builder.begin())

    def begin(self) -> bytes:
        return self._beginning

    def write(self, delta: Delta) -> bytes:
        return _encoded(self._builder.add(delta))

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return _encoded(self._builder.fail(error))


async def _events(
    generation: Generation, builder: ResponseBuilder, writer: ResponseWriter, keep: Callable[[Json], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    """Yield the events of a response, which is kept before its client sees the end. A caller that stops early must
    close the generator.
    """
    has_begun = False
    try:
        async with contextlib.aclosing(event_stream(generation, writer)) as events:
            async for data in events:
                if data:
                    has_begun = True
                    yield data
        last = builder.end()
    except Exception as error:
        if not has_begun:
            raise
        last = builder.fail(to_api_error(error))
    await keep(last[-1]["response"])
    yield _encoded(last)


async def _whole(generation: Generation, builder: ResponseBuilder) -> Json:
    await generate(generation, builder, lambda events: None)
    return builder.response


def _follow(run: BackgroundRun, first: int) -> Response:
    """Return the events of a response in the background, from an index on. It goes on if the client leaves."""
    return EventStreamResponse(run.read(first), lambda error: event(error.body, "error"))


def _encoded(events: list[Json]) -> bytes:
    return b"".join(encode(events))


def _again(
    known: Record, body: ResponsesRequest, model: str, items: list[Json], runs: BackgroundRuns | None
) -> Response:
    """Answer a request for a response in the background that an earlier try of it has begun. Raises ApiError."""
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
    """Return the request's id, unless the client chose it, because ids of responses are unique.

    A response in the background has an id by which the same request finds it. Raises ApiError if the header with the
    key of the request is not valid.
    """
    if body.background and IDEMPOTENCY_KEY in request.headers:
        return f"resp_{id_of_made(request)}"
    return f"resp_{uuid.uuid4().hex}" if scope_of(request).client_chose_id else str(scope_of(request).id)


def _page(items: list[Json], limit: int, after: str | None) -> Json:
    """Return a page of a list, as OpenAI does."""
    first = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(400, f"after: no item has the id {after!r}", param="after")
        first = ids.index(after) + 1
    page = items[first : first + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": first + limit < len(items)}
