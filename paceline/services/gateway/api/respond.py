"""Responses to planned requests, whole or as streams of events, for every API that generates."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from paceline.core.telemetry import set_request_id
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.generation import Generation
from paceline.services.gateway.api.response_format import Json, ResponseFormat, TextChunk
from paceline.services.gateway.api.resume import Origin, StreamIds, answer_digest, received_id, wants_ids
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import ENCODER, EventStreamResponse, event, framed, until_disconnect
from paceline.services.gateway.http.middleware import is_valid_id
from paceline.services.gateway.http.request_scope import RequestScope, aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.answer_format import unenforced_header
from paceline.services.gateway.planning.plan import Plan, with_headers
from paceline.services.gateway.planning.request_body import NamedRequest
from paceline.services.gateway.planning.schemas import GenerationRequest, StreamOptions
from paceline.services.gateway.planning.token_schemas import TokensRequest
from paceline.services.gateway.sequences.traces import RequestTrace

_MARK = "\0"
"""Placeholder for the text in the JSON of a chunk. No other string in a chunk has this value."""
_DONE = b"data: [DONE]\n\n"

SMALL_ANSWER_TOKENS = 64
"""Largest number of tokens of an answer that is written on the event loop. With all logprobs, writing so many takes
about a millisecond."""

MOST_PROMPT_LOGPROBS = 500_000
"""Largest number of logprobs of the tokens of all prompts in one answer. They take about 50 MB as JSON."""
LOGPROB_COST = 400
"""Bytes of memory that are counted for each of these logprobs."""


class StreamWriter(Protocol):
    """A converter of one response's deltas into server-sent events of an API. Methods return b"" for no event."""

    def begin(self) -> bytes:
        """Return the events that begin the stream. They are sent with the first delta, or with an earlier ping."""

    def write(self, delta: Delta) -> bytes:
        """Return the events of a delta."""

    def end(self) -> bytes:
        """Return the events after the last delta."""

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream which has begun and cannot go on."""


async def event_stream(
    generation: Generation, writer: StreamWriter, ids: StreamIds | None = None
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a generation. Events that are ready together are joined.

    A caller that stops early must close the generator.

    Args:
        ids: ids for the events; None for events without ids.
    """
    begun = ids is not None and ids.resumes
    if begun:
        writer.begin()  # the client has these events
    async with generation.running():
        while batch := await generation.batch():
            if ids is None:
                data = b"".join(map(writer.write, batch))
            else:
                data = b"".join(ids.mark(delta, writer.write(delta)) for delta in batch)
            if not begun:
                beginning = writer.begin()
                begun, data = True, (beginning if ids is None else ids.begin(beginning)) + data
            if data:
                yield data
    yield writer.end()


class ChunkWriter:
    """Converts deltas into the stream of OpenAI's chats and completions: chunks, then `[DONE]`; a `StreamWriter`.

    Args:
        usage: returns the usage, with all tokens generated so far.
    """

    def __init__(self, response_format: ResponseFormat, options: StreamOptions, usage: Callable[[], Json]) -> None:
        self._format = response_format
        self._options = options
        self._usage = usage
        self._around_text: dict[tuple[int, str | int], list[str]] = {}
        """For each choice and place, the JSON around the text of its chunks, which differ in nothing but the text."""

    def begin(self) -> bytes:
        return b""

    def write(self, delta: Delta) -> bytes:
        return b"".join(map(self._write_chunk, self._format.chunks(delta)))

    def end(self) -> bytes:
        usage = event(self._format.usage_chunk(self._usage())) if self._options.include_usage else b""
        return usage + _DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.body) + _DONE

    def _write_chunk(self, chunk: Json | TextChunk) -> bytes:
        if not isinstance(chunk, TextChunk):
            return event(self._with_usage(chunk))
        if self._options.continuous_usage_stats:
            return event(self._with_usage(self._format.text_chunk(*chunk)))
        choice, text, place = chunk
        if (around := self._around_text.get((choice, place))) is None:
            whole = ENCODER.encode(self._with_usage(self._format.text_chunk(choice, _MARK, place)))
            around = self._around_text[choice, place] = whole.split(ENCODER.encode(_MARK))
        return framed(ENCODER.encode(text).join(around))

    def _with_usage(self, chunk: Json) -> Json:
        if self._options.include_usage:
            continuous = self._options.continuous_usage_stats
            chunk["usage"] = self._format.usage_so_far(self._usage()) if continuous else None
        return chunk


def choose_id(wanted: str | None, request: Request) -> str:
    """Return the request's id: from its header, else from its body, else a new one of the gateway.

    Args:
        wanted: the `request_id` of the body; None if the body has none.

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
    """Return a request's generation, which does not run yet, and begin its trace.

    Args:
        resumable: the body, if the answer is a stream that its client could continue at another gateway.

    Raises ApiError if a header is not valid, if the request continues the stream of another answer, or if the caller's
    key has no tokens left.
    """
    scope = scope_of(request)
    plan, ids = with_headers(plan, request), None
    salt = model.cache_salts.salt(scope.caller, plan.cache_salt)
    plan = dataclasses.replace(plan, cache_salt=salt, adapter=model.adapter)
    if resumable is not None and wants_ids(request.headers):
        plan, ids = await aside(request, _with_ids, plan, resumable, request)
    else:
        plan = plan.seeded(secrets.randbits(64))
    _take_memory(plan, scope)
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
    """Run a planned request and return its response; a stream if the client wants a stream."""
    generation = await start(model, plan, request, bool(body.stream), body if body.stream else None)
    if body.stream:
        options = body.stream_options or StreamOptions()
        if model.config.enable_force_include_usage:
            options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        return stream(generation, ChunkWriter(response_format, options, generation.usage))
    return await whole(generation, request, response_format.whole)


def stream(generation: Generation, writer: StreamWriter, ping: Callable[[], bytes] | None = None) -> Response:
    """Return the response that runs a generation and sends its events.

    Args:
        ping: returns a ping, as in `EventStreamResponse`; None for its default.
    """
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
    return await aside(request, lambda: LargeJson(body(choices, usage)))


def _take_memory(plan: Plan, scope: RequestScope) -> None:
    """Count the memory of the logprobs of a request's prompts. Raises ApiError or HTTPException if it is too much.

    A short body may ask for a large answer, which comes at once. Logprobs of generated tokens come one by one.
    """
    scored = [prompt for prompt in plan.prompts if prompt.sampling.prompt_logprobs is not None]
    count = plan.n * sum(len(prompt.token_ids) * (1 + (prompt.sampling.prompt_logprobs or 0)) for prompt in scored)
    if count > MOST_PROMPT_LOGPROBS:
        message = (
            f"prompt_logprobs: the answer would have {count} logprobs of prompts, and this server reports "
            f"{MOST_PROMPT_LOGPROBS} at once; send fewer or shorter prompts, or ask for fewer logprobs or choices"
        )
        raise ApiError(400, message, param="prompt_logprobs")
    scope.memory.take(scope.owner, LOGPROB_COST * count)


def _with_ids(plan: Plan, body: NamedRequest, request: Request) -> tuple[Plan, StreamIds]:
    """Return the plan with its seeds, and ids for its stream's events. The stream may continue a broken one."""
    received = received_id(request.headers)
    seed = received.origin.seed if received is not None else secrets.randbits(64)
    origin = Origin.of(answer_digest(plan, body), seed, plan.rendered_at)
    return plan.seeded(seed), StreamIds(origin, received, len(plan.prompts) * plan.n)


_SLICE = 64
"""Number of entries of a long list that are written at once. Entries are tokens with their logprobs at most."""
_FEW = 128
"""Largest number of entries of a list whose entries are written in pieces themselves, such as choices."""
_DEPTH = 6
"""Number of levels that are written in pieces."""


class LargeJson(JSONResponse):
    """A JSON response for large content. The standard writer would let no other thread run until it has ended."""

    def render(self, content: Any) -> bytes:
        return "".join(_pieces(content, _DEPTH)).encode()


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield the text of a JSON value in pieces."""
    if depth and isinstance(value, dict) and value:
        mark = "{"
        for name, member in value.items():
            yield f"{mark}{_written(name)}:"
            yield from _pieces(member, depth - 1)
            mark = ","
        yield "}"
    elif depth and isinstance(value, list) and len(value) > _FEW:
        for start in range(0, len(value), _SLICE):
            yield ("," if start else "[") + _written(value[start : start + _SLICE])[1:-1]
        yield "]"
    elif depth and isinstance(value, list) and value:
        mark = "["
        for entry in value:
            yield mark
            yield from _pieces(entry, depth - 1)
            mark = ","
        yield "]"
    else:
        yield _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
