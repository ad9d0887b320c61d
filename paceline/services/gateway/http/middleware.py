"""Middlewares that make the scopes of requests, answer unexpected errors, and count responses."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.telemetry import request_span, set_request_id
from paceline.services.gateway.http.access.callers import ANYONE, Caller
from paceline.services.gateway.http.bounds import BodyMemory, Bounds, RequestMemory
from paceline.services.gateway.http.error_responses import is_messages_path, logged_response
from paceline.services.gateway.http.errors import to_api_error
from paceline.services.gateway.http.fair_pool import FairPool
from paceline.services.gateway.http.request_scope import RequestScope, set_scope

_ID = re.compile(r"[\x21-\x7e]{1,128}")
ID_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/chat/completions/batch": "chatcmpl-",
    "/v1/messages": "msg_",
    "/v1/responses": "resp_",
    "/inference/v1/generate": "gen-",
    "/score": "score-",
    "/v1/score": "score-",
    "/generative_scoring": "score-",
    "/invocations": "inv-",
    "/rerank": "rerank-",
    "/v1/rerank": "rerank-",
    "/v2/rerank": "rerank-",
    "/v1/embeddings": "embd-",
    "/embeddings": "embd-",
    "/v1/embed": "embd-",
    "/v2/embed": "embd-",
    "/pooling": "pool-",
    "/classify": "classify-",
    "/v1/classify": "classify-",
    "/embed": "embd-",
    "/embed_all": "embd-",
    "/embed_sparse": "embd-",
    "/predict": "classify-",
    "/similarity": "embd-",
}
"""The prefix of request ids for each route whose answers workers compute."""

LINE_CALLER = "paceline.line_caller"
"""Name of the ASGI scope entry that holds the `Caller` of a line of a batch. Clients cannot set this entry."""


def is_valid_id(text: str) -> bool:
    """Return whether a client's request id is safe in logs, headers and keys: 1 to 128 visible ASCII characters."""
    return _ID.fullmatch(text) is not None


class RequestScopeMiddleware:
    """Middleware that makes the `RequestScope` of each request, and answers errors that nothing else has answered.

    A request gets an id: the client's X-Request-Id if it is valid, else a new id. Each answer carries the id, even an
    answer to an unexpected error.

    Args:
        pool: threads for work on bodies.
        bounds: limits of the JSON in a body.
        memory: counter of the memory that all bodies take.
    """

    def __init__(self, app: ASGIApp, pool: FairPool, bounds: Bounds, memory: BodyMemory) -> None:
        self._app = app
        self._pool = pool
        self._bounds = bounds
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request = self._begin(scope, headers, send)
        set_scope(scope, request)
        # The server runs each request in a task of its own, so the id need not be reset.
        set_request_id(request.id)
        begun = False
        # Only generation requests get a trace; probes get none.
        span: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if scope["path"] in ID_PREFIXES:
            span = request_span("http", request.id, headers)

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request.id
                headers.update(request.headers)
                if is_messages_path(scope["path"]):
                    headers["request-id"] = request.id
            await send(message)

        try:
            with span, request.resources:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            answer = to_api_error(error)
            # If the response has begun, return without ending it: then the server closes the connection.
            if not begun:
                await logged_response(answer)(scope, receive, send_with_id)
        finally:
            request.send = None

    def _begin(self, scope: Scope, headers: Headers, send: Send) -> RequestScope:
        given = headers.get("x-request-id", "")
        client_chose_id = is_valid_id(given)
        line_caller: Caller | None = scope.get(LINE_CALLER)
        return RequestScope(
            id=given if client_chose_id else ID_PREFIXES.get(scope["path"], "req-") + uuid.uuid4().hex,
            client_chose_id=client_chose_id,
            pool=self._pool,
            bounds=self._bounds,
            memory=RequestMemory(self._memory),
            send=send,
            caller=line_caller or ANYONE,
            is_background=line_caller is not None,
        )


class CountResponsesMiddleware:
    """Middleware that calls `count` with the route, the method and the status of each response.

    The route is named by its pattern, such as /trace/{request_id}, so that clients cannot create new label values. The
    name is "none" if no route has taken the request.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                handler = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if handler != "none" else "none"
                self._count(handler, method, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)
