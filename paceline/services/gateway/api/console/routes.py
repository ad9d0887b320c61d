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
_COMPARED = frozenset({"embed", "token_embed", "score"})
"""Tasks that the view of embeddings needs."""


def add_console(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes of the console to a router."""
    api = ConsoleApi(gateway)
    router.get("/", response_class=Response, include_in_schema=False)(api.page)
    router.get("/console/feed", response_class=Response, include_in_schema=False)(api.feed)
    router.get("/console/requests", response_model=None, responses=answers(RequestList))(api.requests)
    router.get("/console/{name}", response_class=Response, include_in_schema=False)(api.file)


class ConsoleApi:
    """The routes of the console."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._files = read_files()

    async def page(self, request: Request) -> Response:
        return self._files[PAGE].response(request)

    async def feed(self, model: str | None = None) -> Response:
        # The page learns the names of the models from its first stream, which is of the first model.
        shown = self._gateway.named(model)[0]
        models = self._gateway.models.items()
        pooling = {name: sorted(each.tasks) for name, each in models if each.tasks & _COMPARED}
        about = {"models": list(self._gateway.models), "pooling": pooling}
        # An error ends the stream; the browser then opens a new one.
        return EventStreamResponse(shown.console.watch(about), lambda error: event(error.body, "error"))

    async def requests(self, limit: Annotated[int, Query(ge=1, le=MOST_REQUESTS)] = 100) -> dict[str, Any]:
        """Return the newest requests of this gateway. The trace of each is at /trace/{own_id}."""
        now = time.monotonic()
        return {"requests": [summarize(trace, now) for trace in self._gateway.traces.newest(limit)]}

    async def file(self, name: str, request: Request) -> Response:
        if (found := self._files.get(name)) is None:
            raise ApiError(404, "the console has no such file", code="not_found")
        return found.response(request)
