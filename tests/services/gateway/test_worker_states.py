"""Requests wait until a worker is ready, and leave draining workers without losing a token."""

from __future__ import annotations

import asyncio
import re

import pytest

from paceline.services.common.registry import Role
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT, ToyWorker

pytestmark = pytest.mark.slow


def drain(worker: ToyWorker) -> None:
    """Tell gateways that a worker drains, in its heartbeat and on its event streams."""
    worker.state = "draining"
    worker.outboxes.tell_draining()


async def is_draining(stack: Stack, worker: ToyWorker) -> bool:
    workers = (await stack.http.get("/fleet")).json()["workers"]
    return [each["state"] for each in workers if each["worker_id"] == worker.worker_id] == ["draining"]


async def counts(stack: Stack, running: int, waiting: int) -> bool:
    """Return whether metrics and fleet say that so many requests run and wait."""
    metrics = (await stack.http.get("/metrics")).text
    found = (
        re.search(rf"^paceline:num_requests_{state}{{.*}} (.*)$", metrics, re.MULTILINE)
        for state in ("running", "waiting")
    )
    told = (await stack.http.get("/fleet")).json()["waiting"]
    return [told, *(float(each[1]) for each in found if each)] == [waiting, running, waiting]


async def test_a_stream_goes_on_elsewhere_and_no_attempt_is_spent(start_stack: StartStack) -> None:
    stack = await start_stack(decode=2, max_attempts=1)
    stack.pause_decode(after=5)
    reader = Reader(stack, max_tokens=40)
    await eventually(lambda: len(reader.text) >= 5)
    first = next(worker for worker in stack.workers.values() if worker.role == "decode" and worker.calls)
    second = next(worker for worker in stack.workers.values() if worker.role == "decode" and worker is not first)
    second.resume.set()
    drain(first)
    assert await reader.task == TEXT[:40]
    (call,) = second.calls
    assert call.outcome == "finished"
    assert len(call.work.token_ids) >= len("x") + 5


async def test_without_another_worker_a_stream_stays_and_ends(start_stack: StartStack) -> None:
    stack = await start_stack(decode=1)
    stack.pause_decode(after=5)
    reader = Reader(stack, max_tokens=12)
    await eventually(lambda: len(reader.text) >= 5)
    (worker,) = (worker for worker in stack.workers.values() if worker.role == "decode")
    drain(worker)
    await eventually(lambda: is_draining(stack, worker))
    worker.resume.set()
    assert await reader.task == TEXT[:12]
    assert len(worker.calls) == 1


async def test_new_requests_do_not_go_to_a_worker_that_drains(start_stack: StartStack) -> None:
    stack = await start_stack(decode=2)
    drain(stack.workers["decode-0"])
    await eventually(lambda: is_draining(stack, stack.workers["decode-0"]))
    for _ in range(4):
        assert (await stack.post("/v1/completions", prompt="abc", max_tokens=3)).status_code == 200
    assert stack.workers["decode-0"].calls == []


async def test_a_request_waits_while_a_worker_loads_the_model(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, queue_seconds=60)
    worker = await stack.add("decode", "loading", state="starting")
    await eventually(stack.sees_all)
    assert (await stack.http.get("/v1/models")).json()["data"] == []
    assert (await stack.http.get("/v1/models/toy")).status_code == 503
    asking = asyncio.create_task(stack.post("/v1/completions", prompt="abc", max_tokens=3))
    await asyncio.sleep(0.5)
    assert not asking.done()
    worker.state = "ready"
    assert (await asking).status_code == 200
    assert [card["id"] for card in (await stack.http.get("/v1/models")).json()["data"]] == ["toy"]


async def test_a_request_waits_for_a_worker_that_starts_although_others_have_served(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1, decode=1)
    assert (await stack.post("/v1/completions", prompt="abc", max_tokens=3)).status_code == 200
    worker = await stack.add("decode", "loading", state="starting")
    await eventually(stack.sees_all)
    await stack.workers.pop("decode-0").stop()
    await eventually(stack.sees_all)
    asking = asyncio.create_task(stack.post("/v1/completions", prompt="abc", max_tokens=3))
    await asyncio.sleep(0.5)
    assert not asking.done()
    worker.state = "ready"
    assert (await asking).status_code == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_waits_although_no_worker_is_known_to_start(role: Role, start_stack: StartStack) -> None:
    """A process that imports its libraries, or that is started again after a crash, is not registered yet."""
    scoring = {"max_tokens": 0, "echo": True, "logprobs": 1} if role == "prefill" else {"max_tokens": 3}
    stack = await start_stack(prefill=int(role == "prefill"), decode=int(role == "decode"))
    assert (await stack.post("/v1/completions", prompt="abc", **scoring)).status_code == 200
    await stack.workers.pop(f"{role}-0").stop()
    await eventually(stack.sees_all)
    asking = asyncio.create_task(stack.post("/v1/completions", prompt="abc", **scoring))
    await eventually(lambda: counts(stack, running=0, waiting=1))
    assert not asking.done()
    await stack.add(role, "new")
    assert (await asking).status_code == 200
    await eventually(lambda: counts(stack, running=0, waiting=0))


async def test_scores_do_not_wait_for_a_decode_worker(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1, decode=0)
    await stack.add("decode", "loading", state="starting")
    await eventually(stack.sees_all)
    async with asyncio.timeout(10):
        reply = await stack.post("/v1/completions", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert reply.status_code == 200


async def test_answers_that_have_begun_wait_for_a_worker_that_starts_however_many_they_are(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(prefill=1, decode=1, max_waiting=1)
    first = stack.workers["decode-0"]
    stack.pause_decode(after=2)
    asking = [asyncio.create_task(stack.post("/v1/completions", prompt="abc", seed=0, max_tokens=6)) for _ in range(3)]
    await eventually(lambda: len(first.calls) == 3)
    worker = await stack.add("decode", "loading", state="starting")
    await eventually(stack.sees_all)
    await stack.workers.pop("decode-0").stop()
    await eventually(stack.sees_all)
    await eventually(lambda: counts(stack, running=0, waiting=3))
    assert not any(each.done() for each in asking)
    worker.state = "ready"
    assert [(await each).status_code for each in asking] == [200, 200, 200]


async def test_a_request_does_not_wait_for_a_worker_for_ever(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, queue_seconds=0.3)
    await stack.add("decode", "loading", state="starting")
    await eventually(stack.sees_all)
    assert (await stack.post("/v1/completions", prompt="abc", max_tokens=3)).status_code == 503


async def test_a_request_waits_while_failed_workers_come_back(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1)
    assert (await stack.post("/v1/completions", prompt="abc", max_tokens=3)).status_code == 200
    failed = stack.workers.pop("decode-0")
    await failed._rpc.close(0)
    first = asyncio.create_task(stack.post("/v1/completions", prompt="abc", max_tokens=3))
    await eventually(stack.is_without_workers)
    await failed.leave_redis()
    await eventually(stack.sees_all)
    second = asyncio.create_task(stack.post("/v1/completions", prompt="abc", max_tokens=3))
    await asyncio.sleep(0.3)
    assert (first.done(), second.done()) == (False, False)
    await stack.add("decode", "decode-0")
    assert [(await each).status_code for each in (first, second)] == [200, 200]
