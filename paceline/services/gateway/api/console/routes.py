"""The routes of the console: its page at `/`, and its files and data under `/console`."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.console.files import PAGE, read_files
from paceline.services.gateway.api.operators.bodies import RequestList
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import EventStreamResponse, event
from paceline.services.gateway.telemetry.trace_json import summarize

MOST_REQUESTS = 500


def add_console(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes of the console to a router."""
    files = read_files()

    @router.get("/", response_class=Response, include_in_schema=False)
    async def page(request: Request) -> Response:
        return files[PAGE].response(request)

    @router.get("/console/feed", response_class=Response, include_in_schema=False)
    async def feed(model: str | None = None) -> Response:
        # The page learns the names of the models from its first stream, which is of the first model.
        shown = gateway.named(model)[0]
        about = {"models": list(gateway.models)}
        # An error ends the stream; the browser then opens a new one.
        return EventStreamResponse(shown.console.watch(about), lambda error: event(error.body, "error"))

    @router.get("/console/requests", response_model=None, responses=answers(RequestList))
    async def requests(limit: Annotated[int, Query(ge=1, le=MOST_REQUESTS)] = 100) -> dict[str, Any]:
        """Return the newest requests of this gateway, whose traces are at /trace/{own_id}."""
        now = time.monotonic()
        return {"requests": [summarize(trace, now) for trace in gateway.traces.newest(limit)]}

    @router.get("/console/{name}", response_class=Response, include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if (found := files.get(name)) is None:
            raise ApiError(404, "the console has no such file", code="not_found")
        return found.response(request)
