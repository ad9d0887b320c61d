"""The path of a route, however a client or a proxy spells it, and HEAD, which is GET without the body."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import ConfigError
from paceline.services.gateway.http.access.decisions import DECISIONS, decision_for

MOST_RUNS = 8
"""The most places of a path at which slashes are doubled."""


class PathMiddleware:
    """Middleware that gives each request the path of the route that it means.

    It takes off `root_path` if a proxy has left it there, slashes at the end, and doubled slashes: clients join the
    URL of a server and the path of a route with one slash too many.

    All that comes after it, access rules included, sees the same path for a request, however it was spelled. Therefore
    ASGI's own `root_path` stays empty: with it, the router would take the path off once more, after those rules.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := self._meant(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)

    def _meant(self, path: str) -> str:
        if path in DECISIONS:
            return path
        if self._root_path:
            below = re.sub("^/{2,}", "/", path).removeprefix(self._root_path)
            if below.startswith("/") or not below:
                path = below or "/"
        return spelled_as_route(path)


def spelled_as_route(path: str) -> str:
    """Return the path of the route that `path` means; `path` itself if it means none.

    A parameter that is a path of its own, such as the name of a model, keeps its slashes.
    """
    spelled = path
    for _ in range(MOST_RUNS + 1):
        trimmed = spelled.rstrip("/") or "/"
        if trimmed in DECISIONS:
            return trimmed
        if decision_for(spelled) is not None:
            return spelled
        shorter = re.sub("/{2,}", "/", spelled, count=1)
        if shorter == spelled:
            return path if decision_for(trimmed) is None else trimmed
        spelled = shorter
    return path


def check_root_path(root_path: str, paths: Iterable[str]) -> None:
    """Raise ConfigError if one of the API's own paths begins with `root_path`: nobody could tell the two apart."""
    if root_path and (own := next((path for path in paths if f"{path}/".startswith(f"{root_path}/")), None)):
        raise ConfigError(f"--root-path {root_path} is the beginning of a path of the API ({own}); choose another one")


class HeadMiddleware:
    """Middleware that answers HEAD on each route that takes GET, with the status and headers that GET would have.

    The answer is complete after its headers. A stream sees then that its client has gone, and ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, send_head)
        else:
            await self._app(scope, receive, send)
