"""The results of a request have the same weights, also if workers get others while it is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from paceline.services.common.registry import Member
from paceline.services.gateway.api.pooling.pool import newest_weights
from tests.services.gateway.conftest import Stack, StartStack, eventually

OLD, NEW = "old weights", "new weights"
TEXTS = [f"{index:03}" + "a" * 57 for index in range(40)]
"""Texts of more than LEAST_BUNDLE_TOKENS, so that each of two workers gets a bundle."""


@pytest.fixture
async def rollout(start_stack: StartStack, encoder: Path) -> Stack:
    """A stack with a worker that has the old weights, and one that started later with the new ones."""
    stack = await start_stack(prefill=0, decode=0, model=str(encoder), queue_seconds=1)
    await stack.add("pool", "old", weights=OLD)
    await stack.add("pool", "new", weights=NEW)
    await eventually(stack.sees_all)
    return stack


def texts_at(stack: Stack, name: str) -> list[str]:
    """Return the texts of the calls that a worker has answered to the end, without the special token."""
    calls = [call for call in stack.workers[name].calls if call.outcome == "finished"]
    return [bytes(one.token_ids[:-1]).decode() for call in calls for one in call.work.pool.inputs]


async def ask(stack: Stack) -> httpx.Response:
    return await stack.post("/v1/embeddings", input=TEXTS)


async def test_bundles_with_the_older_weights_are_computed_again(rollout: Stack) -> None:
    answer = await ask(rollout)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == len(TEXTS)
    assert texts_at(rollout, "old")
    assert sorted(texts_at(rollout, "new")) == TEXTS


async def test_a_bundle_whose_weights_have_gone_begins_anew(rollout: Stack) -> None:
    old = rollout.workers["old"]
    old.pause_after = 3
    asked = asyncio.create_task(ask(rollout))
    await eventually(lambda: bool(old.calls) and bool(texts_at(rollout, "new")))
    await old.crash()
    answer = await asked
    assert answer.status_code == 200, answer.text
    assert sorted(texts_at(rollout, "new")) == TEXTS


async def test_what_was_computed_again_is_one_request_in_the_trace(rollout: Stack) -> None:
    answer = await rollout.http.post("/v1/embeddings", json={"input": TEXTS}, headers={"x-request-id": "r"})
    assert answer.status_code == 200
    trace = (await rollout.http.get("/trace/r")).json()
    assert trace["state"] == "finished"


async def test_a_query_and_its_documents_have_the_same_weights(rollout: Stack) -> None:
    answer = await rollout.post("/rerank", query="hello", documents=TEXTS)
    assert answer.status_code == 200, answer.text
    assert sorted(texts_at(rollout, "new")) == sorted(["q: hello", *(f"d: {text}" for text in TEXTS)])


def test_the_newest_weights_are_those_of_the_last_start() -> None:
    def member(epoch: int, weights: str) -> Member:
        return Member(f"w{epoch}", "pool", epoch, "", "", weights=weights)

    members = [member(3, "b"), member(1, "a"), member(9, "c")]
    assert newest_weights(members, {"a", "b"}) == "b"
    assert newest_weights(members[::-1], {"a", "c"}) == "c"
    assert newest_weights([], {"a", "b"}) == "a"
