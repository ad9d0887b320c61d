"""From a planned request to its response, for every API that generates."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.generation import Delta, Generation
from paceline.services.gateway.plan import Plan
from paceline.services.gateway.responses import Json
from paceline.services.gateway.streaming import EventStreamResponse, StreamWriter, event_stream, until_disconnect
from paceline.services.gateway.traces import RequestTrace

CLIENT_CLOSED_REQUEST = 499


def start(gateway: Gateway, plan: Plan, request: Request, is_streamed: bool) -> Generation:
    """Return a request's generation, which does not run yet, with its trace."""
    request_id: str = request.state.request_id
    if request.state.client_chose_id:
        # Clients reuse ids, above all when they retry, but workers need a unique id.
        request_id = f"{request_id}-{uuid.uuid4().hex[:12]}"
    path, arrived = request.url.path, request.state.arrived
    trace = RequestTrace.of(plan, request.state.request_id, request_id, path, arrived, is_streamed)
    gateway.metrics.observe_params(plan)
    return Generation(
        plan,
        trace,
        runner=gateway.runner,
        tokenizer=gateway.tokenizer,
        metrics=gateway.metrics,
        traces=gateway.traces,
    )


def stream(generation: Generation, writer: StreamWriter) -> Response:
    """Return the response that runs a generation and sends its events."""
    return EventStreamResponse(event_stream(generation, writer), writer.error)


async def whole(generation: Generation, request: Request, body: Callable[[list[Delta], Json], Json]) -> Response:
    """Run a generation and return the response with its body.

    Args:
        body: returns the JSON body for the choices and the usage.
    """
    choices = await until_disconnect(request.receive, generation.whole())
    if choices is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(body(choices, generation.usage()))
