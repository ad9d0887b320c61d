"""Responses to planned requests, for every API that generates."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from paceline.core.telemetry import set_request_id
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.generation import Generation
from paceline.services.gateway.api.response_format import Json, ResponseFormat
from paceline.services.gateway.api.resume import Origin, StreamIds, answer_digest, received_id, wants_ids
from paceline.services.gateway.api.streaming import ChunkWriter, StreamWriter, event_stream
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import EventStreamResponse, until_disconnect
from paceline.services.gateway.http.middleware import is_valid_id
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.answer_format import unenforced_header
from paceline.services.gateway.planning.named_request import NamedRequest
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.planning.request_headers import with_headers
from paceline.services.gateway.planning.schemas import GenerationRequest, StreamOptions
from paceline.services.gateway.planning.token_schemas import TokensRequest
from paceline.services.gateway.sequences.traces import RequestTrace

SMALL_ANSWER_TOKENS = 64
"""Tokens whose answer is written at once. With all logprobs, this takes about a millisecond."""


def choose_id(wanted: str | None, request: Request) -> str:
    """Return the request's id: from its header, else from its body, else the one that the gateway made.

    Args:
        wanted: the `request_id` of the body.

    Raises:
        ApiError: the body's id is not valid.
    """
    scope = scope_of(request)
    if wanted is not None and not scope.client_chose_id:
        if not is_valid_id(wanted):
            raise ApiError(400, "request_id must be 1 to 128 visible ASCII characters", param="request_id")
        set_request_id(wanted)
        scope.id, scope.client_chose_id = wanted, True
    return scope.id


async def start(
    model: ModelFleet, plan: Plan, request: Request, is_streamed: bool, resumable: NamedRequest | None = None
) -> Generation:
    """Return a request's generation, which does not run yet, with its trace.

    Args:
        resumable: the body, if the answer is a stream that its client could continue at another gateway.

    Raises ApiError if a header is not valid, if it continues the stream of another answer, or if the caller's key has
    no tokens left.
    """
    scope = scope_of(request)
    plan, ids = with_headers(plan, request), None
    plan = dataclasses.replace(plan, cache_salt=model.cache_salts.salt(scope.caller, plan.cache_salt))
    if resumable is not None and wants_ids(request.headers):
        plan, ids = await aside(request, _with_ids, plan, resumable, request)
    else:
        plan = plan.seeded(secrets.randbits(64))
    scope.headers |= unenforced_header(plan.prompts[0].sampling.constraint)
    scope.admission.charge(
        sum(len(prompt.token_ids) for prompt in plan.prompts),
        sum(prompt.sampling.max_tokens for prompt in plan.prompts) * plan.n,
    )
    scope.resources.callback(scope.admission.refund)
    trace = RequestTrace.of(plan, scope, endpoint=request.url.path, model=model.name, streamed=is_streamed)
    model.metrics.observe_params(plan)
    return Generation(model, plan, trace, scope, ids)


async def respond(
    model: ModelFleet,
    body: GenerationRequest | TokensRequest,
    plan: Plan,
    response_format: ResponseFormat,
    request: Request,
) -> Response:
    """Run a planned request and return its response, a stream if the client wants one."""
    generation = await start(model, plan, request, bool(body.stream), body if body.stream else None)
    if body.stream:
        options = body.stream_options or StreamOptions()
        if model.config.enable_force_include_usage:
            options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        return stream(generation, ChunkWriter(response_format, options, generation.usage))
    return await whole(generation, request, response_format.whole)


def stream(generation: Generation, writer: StreamWriter, ping: Callable[[], bytes] | None = None) -> Response:
    """Return the response that runs a generation and sends its events. See `EventStreamResponse` about pings."""
    ids = generation.ids
    error_events = writer.error if ids is None else lambda error: ids.fail(error, writer.error(error))
    return EventStreamResponse(event_stream(generation, writer, ids), error_events, ping)


async def whole(generation: Generation, request: Request, body: Callable[[list[Delta], Json], Json]) -> Response:
    """Run a generation and return the response with its body.

    Args:
        body: returns the JSON body for the choices and the usage.
    """
    choices = await until_disconnect(request.receive, generation.whole())
    usage = generation.usage()
    if sum(len(choice.tokens) + len(choice.prompt_scores or ()) for choice in choices) <= SMALL_ANSWER_TOKENS:
        return JSONResponse(body(choices, usage))
    return await aside(request, lambda: JSONResponse(body(choices, usage)))


def _with_ids(plan: Plan, body: NamedRequest, request: Request) -> tuple[Plan, StreamIds]:
    """Return the plan with its seeds, and the ids of its stream's events, which may go on where another one broke."""
    received = received_id(request.headers)
    seed = received.origin.seed if received is not None else secrets.randbits(64)
    origin = Origin.of(answer_digest(plan, body), seed, plan.rendered_at)
    return plan.seeded(seed), StreamIds(origin, received, len(plan.prompts) * plan.n)
