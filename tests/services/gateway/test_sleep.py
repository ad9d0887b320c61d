"""Models whose workers sleep: by an operator's wish, and by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.proto.fleet_pb2 import Sleep
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT, ToyWorker

pytestmark = pytest.mark.slow


async def is_sleeping(stack: Stack) -> bool:
    return bool((await stack.http.get("/is_sleeping")).json()["is_sleeping"])


def sleeping(stack: Stack) -> Callable[[], Awaitable[bool]]:
    return lambda: is_sleeping(stack)


async def complete(stack: Stack, **body: object) -> httpx.Response:
    return await stack.post("/v1/completions", prompt="abc", max_tokens=4, seed=0, **body)


async def states(stack: Stack) -> dict[str, str]:
    workers = (await stack.http.get("/fleet")).json()["workers"]
    return {each["worker_id"]: each["state"] for each in workers}


async def test_all_workers_sleep_and_wake_when_an_operator_says_so(stack: Stack) -> None:
    answer = await stack.http.post("/sleep?level=2")
    assert (answer.status_code, answer.content) == (200, b"")
    assert await is_sleeping(stack)
    for worker in stack.workers.values():
        assert (worker.sleep.weights, worker.sleep.kv_cache) == (2, True)
    assert await states(stack) == dict.fromkeys(stack.workers, "sleeping")
    # A sleep is no failure: the server is healthy, and Prometheus knows.
    assert (await stack.http.get("/health")).status_code == 200
    assert 'sleep_state="discard_all"} 1.0' in (await stack.http.get("/metrics")).text
    assert (await stack.http.post("/wake_up")).status_code == 200
    assert not await is_sleeping(stack)
    assert (await complete(stack)).json()["choices"][0]["text"] == TEXT[:4]


async def test_decode_workers_fall_asleep_before_those_that_their_requests_need(stack: Stack) -> None:
    stack.pause_decode(after=2)
    reader = Reader(stack, max_tokens=6)
    await eventually(lambda: len(reader.text) >= 2)
    slept = asyncio.create_task(stack.http.post("/sleep?mode=wait"))
    await eventually(lambda: bool(stack.workers["decode-0"].wishes))
    await asyncio.sleep(0.2)
    assert not stack.workers["prefill-0"].wishes
    stack.workers["decode-0"].resume.set()
    assert await reader.task == TEXT[:6]
    assert (await slept).status_code == 200
    assert stack.workers["prefill-0"].sleep.weights == 1


async def test_abort_ends_running_requests_at_all_gateways(stack: Stack) -> None:
    other = await stack.another_gateway()
    stack.pause_decode(after=2)
    sent = [asyncio.create_task(complete(each)) for each in (stack, other)]
    await eventually(lambda: stack.workers["decode-0"].active == 2)
    assert (await stack.http.post("/sleep?mode=abort")).status_code == 200
    for answer in await asyncio.gather(*sent):
        assert answer.json()["choices"][0]["finish_reason"] == "abort"


async def test_parts_of_the_memory_come_back_one_by_one(stack: Stack) -> None:
    worker = stack.workers["decode-0"]
    assert (await stack.post("/release_memory_occupation", tags=["kv_cache"])).status_code == 200
    assert (worker.sleep.weights, worker.sleep.kv_cache) == (0, True)
    assert (await stack.post("/release_memory_occupation")).status_code == 200
    assert (worker.sleep.weights, worker.sleep.kv_cache) == (1, True)
    assert (await stack.http.post("/wake_up?tags=weights")).status_code == 200
    assert (worker.sleep.weights, worker.sleep.kv_cache) == (0, True)
    assert await is_sleeping(stack)
    assert (await stack.post("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])).status_code == 200
    assert not await is_sleeping(stack)


@pytest.mark.parametrize(
    ("path", "why"),
    [("/sleep?level=0", "level"), ("/sleep?level=3", "level"), ("/sleep?mode=now", "mode"), ("/wake_up?tags=x", "'x'")],
)
async def test_a_wish_that_makes_no_sense_changes_nothing(stack: Stack, path: str, why: str) -> None:
    answer = await stack.http.post(path)
    assert answer.status_code == 400
    assert why in answer.text
    assert not stack.workers["decode-0"].wishes


async def test_if_a_worker_cannot_sleep_all_stay_awake_and_no_request_ends(stack: Stack) -> None:
    stack.workers["prefill-0"].sleep_refusal = InvalidRequestError("weights in memory of its own")
    stack.pause_decode(after=2)
    reader = Reader(stack, max_tokens=6)
    await eventually(lambda: len(reader.text) >= 2)
    answer = await stack.http.post("/sleep?mode=abort")
    assert answer.status_code == 400
    assert "memory of its own" in answer.text
    assert not await is_sleeping(stack)
    stack.workers["decode-0"].resume.set()
    assert await reader.task == TEXT[:6]
    assert not stack.workers["decode-0"].wishes


async def test_if_a_worker_refuses_although_it_said_otherwise_all_wake(stack: Stack) -> None:
    worker = stack.workers["prefill-0"]
    worker.late_refusal = InvalidRequestError("weights in memory of its own")
    answer = await stack.http.post("/sleep")
    assert answer.status_code == 400
    assert "memory of its own" in answer.text
    await eventually(lambda: stack.workers["decode-0"].state == "ready")
    assert not await is_sleeping(stack)


async def test_a_worker_that_fails_is_told_again(stack: Stack) -> None:
    worker = stack.workers["prefill-0"]
    worker.sleep_refusal = UnavailableError("something is wrong")
    answer = await stack.http.post("/sleep")
    assert answer.status_code == 503
    assert "something is wrong" in answer.text
    worker.sleep_refusal = None
    await eventually(lambda: worker.sleep.weights == 1)


async def test_an_operator_whose_wish_is_replaced_by_a_newer_one_learns_it(stack: Stack) -> None:
    stack.pause_decode(after=2)
    reader = Reader(stack, max_tokens=6)
    await eventually(lambda: len(reader.text) >= 2)
    slept = asyncio.create_task(stack.http.post("/sleep?mode=wait"))
    await eventually(lambda: bool(stack.workers["decode-0"].wishes))
    same = asyncio.create_task(stack.http.post("/sleep?mode=keep"))
    await eventually(lambda: len(stack.workers["decode-0"].wishes) == 2)
    assert not slept.done()  # the newer wish is for the same
    assert (await stack.http.post("/wake_up")).status_code == 200
    for answer in await asyncio.gather(slept, same):
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "sleep_replaced"
    stack.workers["decode-0"].resume.set()
    assert await reader.task == TEXT[:6]


async def test_a_sleeping_worker_of_another_model_does_not_put_this_one_to_sleep(stack: Stack) -> None:
    stranger = stack.workers["stranger"] = ToyWorker("decode", "stranger", model="another", state="sleeping")
    stranger.sleep = Sleep(weights=1, kv_cache=True, changed=1 << 62)
    await stranger.start(stack.redis_url, stack.cluster)

    async def is_seen() -> bool:
        return "stranger" in await states(stack)

    await eventually(is_seen)
    assert not await is_sleeping(stack)
    assert not stack.workers["decode-0"].wishes


async def test_a_restarted_worker_of_a_sleeping_model_is_put_to_sleep(stack: Stack) -> None:
    await stack.http.post("/sleep")
    worker = await stack.add("decode", "decode-1")
    await eventually(lambda: worker.sleep.weights == 1)


async def test_a_gateway_that_starts_learns_of_the_sleep_from_the_workers(stack: Stack) -> None:
    await stack.http.post("/sleep")
    await stack.gateway_ends()
    other = await stack.another_gateway()
    await eventually(sleeping(other))
    assert (await other.http.post("/wake_up")).status_code == 200
    assert (await complete(other)).status_code == 200


async def test_a_request_waits_until_an_operator_wakes_the_model(stack: Stack) -> None:
    await stack.http.post("/sleep")
    sent = asyncio.create_task(complete(stack))
    await asyncio.sleep(1.2)  # longer than it takes to wake a model that sleeps by itself
    assert not sent.done()
    assert await is_sleeping(stack)
    await stack.http.post("/wake_up")
    assert (await sent).status_code == 200


async def test_waking_a_part_of_the_memory_aborts_no_request_that_waits(stack: Stack) -> None:
    await stack.http.post("/sleep?mode=abort")
    assert (await stack.http.post("/wake_up?tags=weights")).status_code == 200
    assert [wish.mode for wish in stack.workers["decode-0"].wishes] == ["abort", "wait"]


async def test_a_request_that_has_waited_long_enough_is_told_to_come_back(start_stack: StartStack) -> None:
    stack = await start_stack(queue_seconds=0.5)
    await stack.http.post("/sleep")
    answer = await complete(stack)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_an_idle_model_sleeps_by_itself_and_the_next_request_wakes_it(start_stack: StartStack) -> None:
    stack = await start_stack(sleep_after=1.0)
    other = await stack.another_gateway()
    await eventually(sleeping(stack))
    for gateway in (other, stack):  # any of them
        await eventually(sleeping(gateway))
        assert (await complete(gateway)).json()["choices"][0]["text"] == TEXT[:4]
        assert not await is_sleeping(gateway)
    assert (await stack.http.get("/health")).status_code == 200


async def test_an_operators_sleep_of_a_model_that_sleeps_by_itself_outlives_the_gateways(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(sleep_after=0.5)
    await eventually(sleeping(stack))
    assert (await stack.http.post("/sleep?mode=wait")).status_code == 200
    assert not any(worker.sleep.by_itself for worker in stack.workers.values())


async def test_a_model_that_another_gateway_uses_stays_awake(start_stack: StartStack) -> None:
    stack = await start_stack(sleep_after=3.0)
    other = await stack.another_gateway()
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        assert (await complete(other)).status_code == 200
        await asyncio.sleep(0.2)
    assert not stack.workers["decode-0"].wishes


async def test_a_model_whose_workers_cannot_sleep_is_asked_only_once(start_stack: StartStack) -> None:
    stack = await start_stack(sleep_after=0.5)
    worker = stack.workers["decode-0"]
    worker.sleep_refusal = InvalidRequestError("weights in memory of its own")
    await eventually(lambda: bool(worker.wishes))
    await asyncio.sleep(2.0)
    assert sum(bool(wish.weights) for wish in worker.wishes) == 1
    assert (await complete(stack)).status_code == 200
