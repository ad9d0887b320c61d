"""The scope of a request: what middleware makes of a head, and what follows from it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from paceline.core.config.http import HttpOptions
from paceline.core.request_classes import BACKGROUND
from paceline.services.gateway.http.access.callers import ANYONE, Caller
from paceline.services.gateway.http.bounds import BodyMemory, Bounds
from paceline.services.gateway.http.fair_pool import FairPool
from paceline.services.gateway.http.middleware import LINE_CALLER, RequestScopeMiddleware
from paceline.services.gateway.http.request_scope import RequestScope, scope_of
from tests.services.gateway.toy_scope import toy_scope

ALICE = Caller("alice", "digest of the key", is_admin=False, request_class="chat")


async def scope_made_of(asgi_scope: Scope) -> tuple[RequestScope, Send | None]:
    """Return the scope that middleware makes, as it is after the request, and the `send` that it had before."""
    seen: list[tuple[RequestScope, Send | None]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope_of(scope), scope_of(scope).send))

    middleware = RequestScopeMiddleware(app, FairPool(1), Bounds.of(HttpOptions()), BodyMemory(1 << 20))
    # In a task of its own, because the middleware says whose log lines follow.
    await asyncio.create_task(middleware({"type": "http", **asgi_scope}, nothing, nothing))
    return seen[0]


async def nothing(*_: Any) -> Any:
    pass


@pytest.mark.parametrize(
    ("path", "given", "begins", "is_own"),
    [
        ("/v1/completions", b"", "cmpl-", False),
        ("/health", b"", "req-", False),
        ("/health", b"not an id", "req-", False),
        ("/health", b"mine", "mine", True),
    ],
)
async def test_a_valid_id_of_the_client_is_kept(path: str, given: bytes, begins: str, is_own: bool) -> None:
    scope, _ = await scope_made_of({"path": path, "headers": [(b"x-request-id", given)]})
    assert scope.id.startswith(begins)
    assert scope.client_chose_id == is_own


async def test_the_send_of_the_server_is_known_until_the_end() -> None:
    scope, send = await scope_made_of({"path": "/", "headers": []})
    assert (scope.send, send) == (None, nothing)


async def test_a_line_of_a_batch_has_its_caller_already() -> None:
    line, _ = await scope_made_of({"path": "/", "headers": [], LINE_CALLER: ALICE})
    assert (line.caller, line.request_class) == (ALICE, BACKGROUND)
    client, _ = await scope_made_of({"path": "/", "headers": []})
    assert (client.caller, client.is_background) == (ANYONE, False)


def test_the_class_is_that_of_the_caller() -> None:
    assert toy_scope(caller=ALICE).request_class == "chat"


def test_only_ids_of_clients_are_made_unique() -> None:
    ours, theirs = toy_scope("r", client_chose_id=False), toy_scope("r", client_chose_id=True)
    assert ours.unique_id() == "r"
    assert theirs.unique_id().startswith("r-")
    assert theirs.unique_id() != theirs.unique_id()
