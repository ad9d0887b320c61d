"""`bench.gateway.hostile_bodies` attacks every route for clients, with bodies that are as large as the limits allow."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from bench.gateway.hostile_forms import ALIASES, BYTES, LEFT_OUT, MODELS, Attack, attacks, combined, routes
from paceline.services.gateway.http.paths import DECISIONS, Access
from tests.services.gateway.conftest import StartStack

Json = dict[str, Any]


@pytest.fixture
async def openapi(start_stack: StartStack, tmp_path: Path) -> Json:
    stack = await start_stack(store=str(tmp_path / "store.db"))
    found: Json = (await stack.http.get("/openapi.json")).json()
    return found


async def test_every_route_for_clients_is_attacked(openapi: Json) -> None:
    clients = {re.sub(r":path\}", "}", path) for path, access in DECISIONS.items() if access is Access.CLIENT}
    with_body, others = routes(openapi)
    assert {*with_body, *others} | ALIASES.keys() | LEFT_OUT == clients
    assert MODELS.keys() <= {*with_body}
    for path in {*with_body, *others}:
        assert list(attacks(openapi, path, random.Random(1), 1)), path


async def test_an_alias_is_the_same_route(openapi: Json) -> None:
    for alias, path in ALIASES.items():
        one, other = (openapi["paths"][each]["post"]["requestBody"] for each in (alias, path))
        assert one == other


async def test_worst_bodies_are_combined(openapi: Json) -> None:
    tried = [body for body in attacks(openapi, "/v1/embeddings", random.Random(1), 12) if body.body]
    assert len(tried) == 12
    assert max(len(body.body) for body in tried) > BYTES // 2
    both = list(combined(tried[:4]))
    assert both
    for each in both:
        assert len({part.name for part in each.parts}) == len(each.parts) == 2
        assert json.loads(each.body).keys() >= {part.name for part in each.parts}
    assert not list(combined([Attack("/x", "", b"x"), *tried[:1]]))
