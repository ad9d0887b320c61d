"""The ids of requests, and the answer to an error that nobody has expected."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.telemetry import request_span, set_request_id
from paceline.services.gateway.http.errors import is_messages_path, to_api_error

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
}
"""The routes whose answers workers compute, and the beginning of their requests' ids."""


def is_valid_id(text: str) -> bool:
    """Return whether a client's request id is safe in logs, headers and keys: 1 to 128 visible ASCII characters."""
    return _ID.fullmatch(text) is not None


class RequestIdMiddleware:
    """Middleware that gives each request an id: the client's X-Request-Id if it is valid, else a new one.

    The id is in `request.state.request_id`, in log lines and in every response, even after an unexpected error.
    `request.state.arrived` is when the head came, on time.monotonic(). `request.state.waited` is how many seconds of
    `--queue-seconds` the request has used up because no worker was ready. `request.state.send` is the server's own
    `send`, which may send a body after its head has passed the middlewares. `request.state.headers` are added to those
    of the answer. `request.state.resources` is closed when the request ends, or before, when its generation runs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["arrived"], state["waited"], state["send"] = time.monotonic(), 0.0, send
        state["client_chose_id"], state["headers"] = is_valid_id(given), {}
        own = ID_PREFIXES.get(scope["path"], "req-") + uuid.uuid4().hex
        state["request_id"] = given if state["client_chose_id"] else own
        # The server runs each request in a task of its own, so the id need not be reset.
        set_request_id(state["request_id"])
        begun = False
        # Only generation requests get a trace; probes get none.
        span: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if scope["path"] in ID_PREFIXES:
            span = request_span("http", state["request_id"], Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]
                headers.update(state["headers"])
                if is_messages_path(scope["path"]):
                    headers["request-id"] = state["request_id"]
            await send(message)

        try:
            with span, contextlib.ExitStack() as state["resources"]:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            answer = to_api_error(error)
            # If the response has begun, return without ending it: then the server closes the connection.
            if not begun:
                await answer.response()(scope, receive, send_with_id)
        finally:
            del state["send"]  # it knows the scope, so that the cycle would keep the request in memory


class CountResponsesMiddleware:
    """Middleware that calls `count` with the route, the method and the status of each response.

    The route is its pattern, such as /trace/{request_id}, so that clients cannot make up new ones; "none" if no route
    has taken the request.
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
