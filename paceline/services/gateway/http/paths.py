"""The paths of routes: who may call each path, how clients and proxies spell it, and HEAD: GET without the body.

A path that is not in the table DECISIONS does not exist: the guard answers it with 404.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from re import Pattern

from fastapi import APIRouter
from starlette.routing import BaseRoute, Mount, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import ConfigError

MOST_RUNS = 8
"""Largest number of doubled slashes that are mended in one path."""


TEI_PATH = "/embed"
"""The route for POST /. Clients of TEI, such as LangChain's, send texts to the URL of the server itself."""


class Access(enum.Enum):
    """The callers to whom a route is open."""

    OPEN = "open"
    """Everybody may call the route. It reveals nothing about requests and clients."""
    CLIENT = "client"
    """Callers with a key; everybody if no client key is configured. A caller sees only requests of its own key."""
    ADMIN = "admin"
    """Callers with an admin key; processes of this machine if no admin key is configured."""


DECISIONS: dict[str, Access] = {
    # For load balancers, orchestrators and Prometheus, which have no key. Metrics name workers and count tokens.
    "/health": Access.OPEN,
    "/ping": Access.OPEN,
    "/version": Access.OPEN,
    "/metrics": Access.OPEN,
    "/openapi.json": Access.OPEN,
    "/load": Access.CLIENT,
    "/v1/models": Access.CLIENT,
    "/v1/models/{model:path}": Access.CLIENT,
    "/v1/completions": Access.CLIENT,
    "/v1/completions/render": Access.CLIENT,
    "/v1/completions/derender": Access.CLIENT,
    "/v1/chat/completions": Access.CLIENT,
    "/v1/chat/completions/batch": Access.CLIENT,
    "/v1/chat/completions/render": Access.CLIENT,
    "/v1/chat/completions/derender": Access.CLIENT,
    "/v1/messages": Access.CLIENT,
    "/v1/messages/count_tokens": Access.CLIENT,
    "/v1/messages/render": Access.CLIENT,
    # A key sees its own batches, an admin all.
    "/v1/messages/batches": Access.CLIENT,
    "/v1/messages/batches/{batch_id}": Access.CLIENT,
    "/v1/messages/batches/{batch_id}/cancel": Access.CLIENT,
    "/v1/messages/batches/{batch_id}/results": Access.CLIENT,
    "/v1/responses": Access.CLIENT,
    "/v1/responses/input_tokens": Access.CLIENT,
    "/v1/responses/render": Access.CLIENT,
    "/v1/responses/{response_id}": Access.CLIENT,
    "/v1/responses/{response_id}/cancel": Access.CLIENT,
    "/v1/responses/{response_id}/input_items": Access.CLIENT,
    "/v1/conversations": Access.CLIENT,
    "/v1/conversations/{conversation_id}": Access.CLIENT,
    "/v1/conversations/{conversation_id}/items": Access.CLIENT,
    "/v1/conversations/{conversation_id}/items/{item_id}": Access.CLIENT,
    # A key sees its own files and batches, an admin all.
    "/v1/files": Access.CLIENT,
    "/v1/files/{file_id}": Access.CLIENT,
    "/v1/files/{file_id}/content": Access.CLIENT,
    "/v1/batches": Access.CLIENT,
    "/v1/batches/{batch_id}": Access.CLIENT,
    "/v1/batches/{batch_id}/cancel": Access.CLIENT,
    "/inference/v1/generate": Access.CLIENT,
    "/invocations": Access.CLIENT,
    "/tokenize": Access.CLIENT,
    "/tokenizer_info": Access.CLIENT,
    "/detokenize": Access.CLIENT,
    "/decode": Access.CLIENT,
    "/score": Access.CLIENT,
    "/v1/score": Access.CLIENT,
    "/generative_scoring": Access.CLIENT,
    "/rerank": Access.CLIENT,
    "/v1/rerank": Access.CLIENT,
    "/v2/rerank": Access.CLIENT,
    "/v1/embeddings": Access.CLIENT,
    "/embeddings": Access.CLIENT,
    "/v1/embed": Access.CLIENT,
    "/v2/embed": Access.CLIENT,
    "/pooling": Access.CLIENT,
    "/classify": Access.CLIENT,
    "/v1/classify": Access.CLIENT,
    "/embed": Access.CLIENT,
    "/embed_all": Access.CLIENT,
    "/embed_sparse": Access.CLIENT,
    "/predict": Access.CLIENT,
    "/similarity": Access.CLIENT,
    "/info": Access.CLIENT,
    # These two show and end requests of others only to admins.
    "/trace/{request_id:path}": Access.CLIENT,
    "/abort_requests": Access.CLIENT,
    "/fleet": Access.ADMIN,
    "/fleet/scale": Access.ADMIN,
    "/fleet/steps": Access.ADMIN,
    "/reset_prefix_cache": Access.ADMIN,
    "/sleep": Access.ADMIN,
    "/wake_up": Access.ADMIN,
    "/is_sleeping": Access.ADMIN,
    "/release_memory_occupation": Access.ADMIN,
    "/resume_memory_occupation": Access.ADMIN,
    "/v1/load_lora_adapter": Access.ADMIN,
    "/v1/unload_lora_adapter": Access.ADMIN,
    "/server_info": Access.ADMIN,
    "/": Access.ADMIN,
    "/console/feed": Access.ADMIN,
    "/console/requests": Access.ADMIN,
    "/console/{name}": Access.ADMIN,
}

_PATTERNS: list[tuple[Pattern[str], Access]] = [
    (compile_path(path)[0], access) for path, access in DECISIONS.items() if "{" in path
]


def decision_for(path: str) -> Access | None:
    """Return the callers to whom a path is open; None if no route has this path."""
    if (decided := DECISIONS.get(path)) is not None:
        return decided
    return next((access for pattern, access in _PATTERNS if pattern.match(path)), None)


_NOT_YET = dict.fromkeys(
    ("/v1/audio/transcriptions", "/v1/audio/translations"), "speech recognition is not supported yet"
)
"""Paths that other servers of the OpenAI API have, with the reason why each is missing here."""


def why_missing(path: str) -> str:
    """Return the end of an error message: why a path is missing, or which path the client may mean; "" if unknown."""
    if path in _NOT_YET:
        return f"; {_NOT_YET[path]}"
    # The base URL of OpenAI's clients ends with /v1, that of Anthropic's does not.
    meant = next((each for each in (f"/v1{path}", path.removeprefix("/v1")) if each in DECISIONS), None)
    return f"; do you mean {meant}?" if meant is not None else ""


def check_decided(routes: Iterable[BaseRoute]) -> None:
    """Raise LookupError if DECISIONS has no entry for the path of a route."""
    if missing := sorted({path for path in paths_of(routes) if path not in DECISIONS}):
        raise LookupError(f"nobody has decided who may call {', '.join(missing)}: add it to http/paths.py")


def paths_of(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """Yield the path of each route in the format of DECISIONS. That of a mounted application ends in `{path:path}`."""
    for route in routes:
        router = getattr(route, "original_router", None)  # of a router that FastAPI has included
        if isinstance(router, APIRouter):
            yield from paths_of(router.routes)
        elif isinstance(route, Mount):
            yield f"{route.path}/{{path:path}}"
        else:
            yield str(getattr(route, "path", route))


class PathMiddleware:
    """Middleware that gives each request the path of the route that it means.

    It removes `root_path` if a proxy has left it in the path, slashes at the end, and doubled slashes: clients join the
    URL of a server and the path of a route with one slash too many.

    The following middlewares, access rules included, and the router see the same path however the client spelled it.
    ASGI's own `root_path` stays empty. Otherwise the router would remove the root path a second time, after the access
    rules have decided.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = self._meant(scope["path"])
            if path == "/" and scope["method"] == "POST":
                path = TEI_PATH
            if path != scope["path"]:
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
    """Return the path of the route that the client means with `path`; `path` itself if no route fits.

    A path parameter that contains slashes itself, such as the name of a model, keeps them.
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
    """Raise ConfigError if a path of the API begins with `root_path`, because requests would then be ambiguous."""
    if root_path and (own := next((path for path in paths if f"{path}/".startswith(f"{root_path}/")), None)):
        raise ConfigError(f"--root-path {root_path} is the beginning of a path of the API ({own}); choose another one")


class HeadMiddleware:
    """Middleware that answers HEAD on each route that takes GET, with the status and headers that GET would have.

    The answer is complete after its headers. The work of a stream is told that the client has disconnected, and ends.
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
