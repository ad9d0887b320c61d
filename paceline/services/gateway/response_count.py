"""The count of HTTP responses by route and status."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
