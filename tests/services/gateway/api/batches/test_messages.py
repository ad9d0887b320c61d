"""Anthropic's message batches, by Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import MessageBatch

from paceline.services.gateway.api.batches import messages
from paceline.services.gateway.api.batches.batch import Batch, Status
from paceline.services.gateway.api.batches.file_store import File, FileStore, MissingFileError
from paceline.services.gateway.api.batches.lines import LineReply, answer_line
from paceline.services.gateway.api.batches.messages import _results, result_of, shown
from paceline.services.gateway.store.database import open_database
from paceline.services.gateway.store.store import Store
from tests.services.gateway.api.batches.conftest import StartBatches, line, submit
from tests.services.gateway.conftest import PATIENCE, Stack, eventually

Json = dict[str, Any]


def request(name: str, **params: Any) -> Any:
    whole = {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": name}], **params}
    return {"custom_id": name, "params": whole}


class Clients:
    """Anthropic's client, with any key."""

    def __init__(self) -> None:
        self._open: list[anthropic.AsyncAnthropic] = []

    def of(self, stack: Stack, key: str = "none") -> Any:
        client = anthropic.AsyncAnthropic(base_url=stack.url, api_key=key, max_retries=0, timeout=PATIENCE)
        self._open.append(client)
        return client.messages.batches

    async def close(self) -> None:
        for client in self._open:
            await client.close()


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    made = Clients()
    yield made
    await made.close()


async def ended(batches: Any, batch_id: str) -> MessageBatch:
    found: list[MessageBatch] = []

    async def has_ended() -> bool:
        found[:] = [await batches.retrieve(batch_id)]
        return found[0].processing_status == "ended"

    await eventually(has_ended)
    return found[0]


async def results(batches: Any, batch_id: str) -> dict[str, Any]:
    told = [each async for each in await batches.results(batch_id)]
    by_id = {each.custom_id: each.result for each in told}
    assert len(by_id) == len(told)
    return by_id


async def test_each_request_gets_its_result(start_batches: StartBatches, clients: Clients) -> None:
    stack = await start_batches()
    batches = clients.of(stack)
    made = await batches.create(
        requests=[request("a"), request("wrong", max_tokens=-1), request("m", model="no"), request("s", stream=True)]
    )
    assert made.id.startswith("msgbatch_")
    assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
    assert (made.request_counts.processing, (made.expires_at - made.created_at).total_seconds()) == (4, 86400)
    over = await ended(batches, made.id)
    counts = over.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 1, 3, 0, 0)
    assert over.ended_at is not None
    told = await results(batches, made.id)
    assert (told["a"].type, told["a"].message.role) == ("succeeded", "assistant")
    assert told["a"].message.usage.output_tokens == 4
    assert (told["wrong"].error.type, told["wrong"].error.error.type) == ("error", "invalid_request_error")
    assert "max_tokens" in told["wrong"].error.error.message
    assert told["m"].error.error.type == "not_found_error"
    assert (told["s"].error.error.type, "streams" in told["s"].error.error.message) == ("invalid_request_error", True)
    assert (await batches.delete(made.id)).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await batches.retrieve(made.id)
    assert (await stack.openai.files.list()).data == []


async def test_what_was_cancelled_is_told(start_batches: StartBatches, clients: Clients) -> None:
    stack = await start_batches(prefill=0, decode=0)
    batches = clients.of(stack)
    made = await batches.create(requests=[request("a"), request("b")])
    early = await stack.http.get(f"/v1/messages/batches/{made.id}/results")
    assert (early.status_code, "has not ended" in early.text) == (404, True)
    with pytest.raises(anthropic.ConflictError, match="cancel it first"):
        await batches.delete(made.id)
    cancelled = await batches.cancel(made.id)
    assert cancelled.cancel_initiated_at is not None
    over = await ended(batches, made.id)
    assert over.request_counts.canceled == 2
    assert {name: result.type for name, result in (await results(batches, made.id)).items()} == {
        "a": "canceled",
        "b": "canceled",
    }


async def test_what_came_too_late_is_told(
    start_batches: StartBatches, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "WINDOW_SECONDS", 1)
    stack = await start_batches()
    stack.pause_decode(after=2)
    batches = clients.of(stack)
    made = await batches.create(requests=[request("long", max_tokens=20), request("short", max_tokens=1)])
    over = await ended(batches, made.id)
    assert (over.request_counts.succeeded, over.request_counts.expired, over.request_counts.errored) == (1, 1, 0)
    told = await results(batches, made.id)
    assert (told["long"].type, told["short"].type) == ("expired", "succeeded")


async def test_pages_go_both_ways_and_have_no_batches_of_other_kinds(
    start_batches: StartBatches, clients: Clients
) -> None:
    stack = await start_batches(prefill=0, decode=0)
    batches = clients.of(stack)
    other = await submit(stack, [line("a")])
    made = [(await batches.create(requests=[request("a")])).id for _ in range(5)]
    newest = made[::-1]
    assert [each.id async for each in batches.list(limit=2)] == newest
    page = await batches.list(limit=2, before_id=newest[4])
    assert ([each.id for each in page.data], page.has_more) == (newest[2:4], True)
    assert (page.first_id, page.last_id) == (newest[2], newest[3])
    page = await batches.list(limit=2, before_id=newest[1])
    assert ([each.id for each in page.data], page.has_more) == (newest[:1], False)
    assert [each.id for each in (await stack.openai.batches.list()).data] == [other.id]
    with pytest.raises(anthropic.NotFoundError):
        await batches.retrieve(other.id)
    assert (await stack.http.get(f"/v1/batches/{made[0]}")).status_code == 404


async def test_other_keys_see_nothing(start_batches: StartBatches, clients: Clients) -> None:
    stack = await start_batches(api_key="alice,bob", admin_key="root")
    alice, bob, root = (clients.of(stack, key) for key in ("alice", "bob", "root"))
    made = await alice.create(requests=[request("a")])
    await ended(alice, made.id)
    for call in (bob.retrieve, bob.cancel, bob.delete, bob.results):
        with pytest.raises(anthropic.NotFoundError):
            await call(made.id)
    assert (await bob.list()).data == []
    with pytest.raises(anthropic.NotFoundError):
        await bob.list(after_id=made.id)
    assert [each.id for each in (await root.list()).data] == [made.id]
    assert set(await results(root, made.id)) == {"a"}
    with pytest.raises(anthropic.AuthenticationError):
        await clients.of(stack, "nobody").list()


REFUSED: list[tuple[Json, str]] = [
    ({}, "requests"),
    ({"requests": []}, "requests"),
    ({"requests": [{"custom_id": "a"}]}, "requests[0].params"),
    ({"requests": [{"custom_id": "a b", "params": {}}]}, "requests[0].custom_id"),
    ({"requests": [{"custom_id": "x" * 65, "params": {}}]}, "requests[0].custom_id"),
    ({"requests": [request("a"), request("a")]}, "requests[1].custom_id"),
    ({"requests": [request(str(index)) for index in range(4)]}, "--max-batch-lines"),
]


async def test_what_no_batch_can_be_is_refused(start_batches: StartBatches) -> None:
    stack = await start_batches(prefill=0, decode=0, max_batch_lines=3)
    for body, told in REFUSED:
        answer = await stack.post("/v1/messages/batches", **body)
        assert (answer.status_code, answer.json()["type"]) == (400, "error"), answer.text
        assert told in answer.json()["error"]["message"]
    assert (await stack.http.get("/v1/messages/batches")).json() == {
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    assert (await stack.http.get("/v1/messages/batches?after_id=a&before_id=b")).status_code == 400


async def test_two_tries_of_one_request_make_one_batch(start_batches: StartBatches, clients: Clients) -> None:
    stack = await start_batches(prefill=0, decode=0)
    batches = clients.of(stack)
    header = {"Idempotency-Key": "once"}
    tries = [batches.create(requests=[request("a")], extra_headers=header) for _ in range(2)]
    first, second = await asyncio.gather(*tries)
    assert first.id == second.id
    with pytest.raises(anthropic.UnprocessableEntityError, match="take a new key"):
        await batches.create(requests=[request("b")], extra_headers=header)
    assert len((await batches.list()).data) == 1


async def test_a_limit_of_the_key_is_no_end(start_batches: StartBatches, clients: Clients, tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "alice"\nmax_concurrent = 1\n')
    keys.chmod(0o600)
    stack = await start_batches(api_keys_file=str(keys))
    batches = clients.of(stack, "alice")
    made = await batches.create(requests=[request(str(index)) for index in range(6)])
    assert (await ended(batches, made.id)).request_counts.succeeded == 6


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_all_are_processing_until_the_end(status: Status) -> None:
    batch = Batch(
        id="msgbatch_1", owner="", endpoint="/v1/messages", input_file_id="f", completion_window="24h", created=0.5,
        expires=9, status=status, total=3, completed=1, failed=1, times={status: 2.0},
    )  # fmt: skip
    counts = shown(batch)["request_counts"]
    assert counts == {"processing": 3, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    assert shown(batch)["created_at"] == "1970-01-01T00:00:00.500000Z"


def test_an_answer_that_no_server_gave_is_an_error_of_the_server() -> None:
    told = result_of({"custom_id": "a", "response": None, "error": {"code": "lost", "message": "why"}})
    assert told["result"]["error"]["error"] == {"type": "api_error", "message": "why"}


async def test_results_that_are_deleted_while_they_are_read_are_not_whole(tmp_path: Path) -> None:
    store = Store(open_database(str(tmp_path / "store.db")))
    files = FileStore(store, entries=9, max_bytes=1 << 20)
    file = File("file-1", "me", "batch_output", "out.jsonl", 0, 0.0, time.time() + 60)
    await files.begin(file)
    for number, name in enumerate("ab"):
        await files.append(file, number, f"{answer_line(name, LineReply(200, 'r', '{}'))}\n".encode())
    await files.finish(file)
    about: Json = {"endpoint": "/v1/messages", "input_file_id": "in", "completion_window": "24h", "created": 0.0}
    done = Batch(id="b", owner="me", expires=0.0, status="completed", total=2, output_file_id=file.id, **about)
    told = [json.loads(each)["custom_id"] async for each in _results(files, done)]
    assert told == ["a", "b"]
    reading = _results(files, done)
    await anext(reading)
    await files.discard(file.id)
    with pytest.raises(MissingFileError, match="deleted while it was read"):
        await anext(reading)
    store.close()
