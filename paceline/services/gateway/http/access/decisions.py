"""The table of routes and their callers. A path that is not in it does not exist: the guard answers it with 404."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from re import Pattern

from fastapi import APIRouter
from starlette.routing import BaseRoute, Mount, compile_path


class Access(enum.Enum):
    """The callers to whom a route is open."""

    OPEN = "open"
    """Everybody. Such a route tells nothing about requests and their clients."""
    CLIENT = "client"
    """Whoever has a key; everybody if no client key is configured. A key sees only what it has sent itself."""
    ADMIN = "admin"
    """Whoever has an admin key; processes of this machine if no admin key is configured."""


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
    "/score": Access.CLIENT,
    "/v1/score": Access.CLIENT,
    "/generative_scoring": Access.CLIENT,
    "/rerank": Access.CLIENT,
    "/v1/rerank": Access.CLIENT,
    "/v2/rerank": Access.CLIENT,
    # These two show and end requests of others only to admins.
    "/trace/{request_id:path}": Access.CLIENT,
    "/abort_requests": Access.CLIENT,
    "/fleet": Access.ADMIN,
    "/fleet/scale": Access.ADMIN,
    "/fleet/steps": Access.ADMIN,
    "/reset_prefix_cache": Access.ADMIN,
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
    """Return who may call a path; None if no route has it."""
    if (decided := DECISIONS.get(path)) is not None:
        return decided
    return next((access for pattern, access in _PATTERNS if pattern.match(path)), None)


_NOT_YET = {
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/classify"), "embeddings are not supported yet"),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), "speech recognition is not supported yet"),
}
"""Paths of other servers of the OpenAI API, and why they are missing here."""


def why_missing(path: str) -> str:
    """Return the end of a sentence that says why a path is missing, or what its client may mean; "" if unknown."""
    if path in _NOT_YET:
        return f"; {_NOT_YET[path]}"
    # The base URL of OpenAI's clients ends with /v1, that of Anthropic's does not.
    meant = next((each for each in (f"/v1{path}", path.removeprefix("/v1")) if each in DECISIONS), None)
    return f"; do you mean {meant}?" if meant is not None else ""


def check_decided(routes: Iterable[BaseRoute]) -> None:
    """Raise LookupError if no decision was made about a route."""
    if missing := sorted({path for path in paths_of(routes) if path not in DECISIONS}):
        raise LookupError(f"nobody has decided who may call {', '.join(missing)}: add it to http/access/decisions.py")


def paths_of(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """Yield the path of each route, as in DECISIONS; a mounted application has `{path:path}` at its end."""
    for route in routes:
        router = getattr(route, "original_router", None)  # of a router that FastAPI has included
        if isinstance(router, APIRouter):
            yield from paths_of(router.routes)
        elif isinstance(route, Mount):
            yield f"{route.path}/{{path:path}}"
        else:
            yield str(getattr(route, "path", route))
