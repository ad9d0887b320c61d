"""Hosts are told which contexts of agents will come back."""

from __future__ import annotations

import pytest

from paceline.services.gateway.planning.cache_hints import OPEN_CALL, RETENTION_SECONDS, STORED
from tests.services.gateway.api.responses.conftest import call, recite
from tests.services.gateway.conftest import Stack, eventually

FUNCTION = {"name": "look", "description": "Look around.", "parameters": {"type": "object", "properties": {}}}
CHAT = {
    "messages": [{"role": "user", "content": "x" * 60}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "seed": 0,
}
RESPONSE = {"input": "x" * 60, "seed": 0}


@pytest.mark.parametrize(
    ("path", "body", "answer", "seconds"),
    [
        ("/v1/chat/completions", CHAT, call("look"), [OPEN_CALL.seconds]),
        ("/v1/chat/completions", CHAT, "nothing to see", []),
        ("/v1/responses", {**RESPONSE, "store": True}, "kept", [STORED.seconds]),
        ("/v1/responses", {**RESPONSE, "store": False}, "not kept", []),
    ],
    ids=["open call", "answer", "stored", "not stored"],
)
async def test_a_host_is_told_what_the_answer_promises(
    agents: Stack, path: str, body: dict[str, object], answer: str, seconds: list[float]
) -> None:
    host = await agents.add("kvtransfer", "kv", host_id=agents.workers["decode-0"].host_id)
    host.pretends_to_cache = list(range(16))
    await eventually(agents.sees_all)
    recite(agents, answer)

    async def knows_the_host() -> bool:
        got = await agents.http.post("/v1/chat/completions", json={**CHAT, "prompt_cache_key": "k"})
        assert got.status_code == 200, got.text
        return bool(host.expectations)

    await eventually(knows_the_host)
    # With a hint of the client, a message comes in any case, and says whether there is another hint.
    got = await agents.http.post(path, json={**body, "prompt_cache_retention": "24h"})
    assert got.status_code == 200, got.text

    def told() -> list[float]:
        return [hint.within_ms / 1000 for hint in host.expectations[-1].hints]

    await eventually(lambda: told()[0] == RETENTION_SECONDS["24h"])
    assert told()[1:] == seconds
