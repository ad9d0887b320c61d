"""The path below which a proxy offers the API."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import ConfigError


class RootPathMiddleware:
    """Middleware that takes `root_path` off the paths of requests whose proxy has left it there.

    All that comes after it, access rules included, sees the same path for a request, whatever the proxy does. Therefore
    ASGI's own `root_path` stays empty: with it, the router would take the path off once more, after those rules.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(self._root_path)
            if path.startswith("/") or not path:
                scope = {**scope, "path": path or "/"}
        await self._app(scope, receive, send)


def check_root_path(root_path: str, paths: Iterable[str]) -> None:
    """Raise ConfigError if one of the API's own paths begins with `root_path`: nobody could tell the two apart."""
    if root_path and (own := next((path for path in paths if f"{path}/".startswith(f"{root_path}/")), None)):
        raise ConfigError(f"--root-path {root_path} is the beginning of a path of the API ({own}); choose another one")
