"""Requests wait while no worker is ready, above all in a fleet that a planner may leave without decode workers."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, UnavailableError
from paceline.core.model_folder import model_digest
from paceline.proto.fleet_pb2 import PlanReport
from paceline.services.common.registry import Member
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError, LeavingError
from paceline.services.gateway.http.request_scope import scope_of, set_scope
from paceline.services.gateway.planning.plan import Plan, with_headers
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.queueing.worker_wait import WorkerWait
from tests.services.gateway.conftest import PATIENCE, Cluster, Stack, StartStack, eventually
from tests.services.gateway.toy_scope import toy_scope
from tests.services.gateway.toy_workers import TEXT, ToyWorker

pytestmark = pytest.mark.slow

PLAN = Plan(prompts=[], n=1, stop=(), include_stop=False, skip_special_tokens=True, cache_salt="")


class ToyPlanner(ToyWorker):
    """A planner that starts nothing, although it says so."""

    def __init__(self, *may_be_empty: str) -> None:
        super().__init__("planner", "planner")
        self._plan = PlanReport(leads=True, may_be_empty=may_be_empty)

    def _member(self) -> Member:
        return dataclasses.replace(super()._member(), plan=self._plan)


async def add_planner(stack: Stack, *may_be_empty: str) -> ToyWorker:
    planner = ToyPlanner(*may_be_empty)
    stack.workers["planner"] = planner
    await planner.start(stack.redis_url, stack.cluster)
    await eventually(stack.sees_all)
    return planner


async def test_requests_wait_for_a_planner_s_worker_however_long_it_takes_to_start(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, queue_seconds=0.2)
    assert (await stack.http.get("/health")).status_code == 503
    planner = await add_planner(stack, "decode")
    assert (await stack.http.get("/health")).status_code == 200
    waiting = asyncio.create_task(stack.post("/v1/completions", prompt="x", seed=0, max_tokens=6))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await stack.add("decode", "decode-0")
    reply = await waiting
    assert reply.json()["choices"][0]["text"] == TEXT[:6]

    # The last worker ends, and later the planner, too. Then nobody starts a worker.
    await stack.workers.pop("decode-0").stop()
    await eventually(stack.sees_all)
    waiting = asyncio.create_task(stack.post("/v1/completions", prompt="x", seed=0, max_tokens=6))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await stack.workers.pop("planner").stop()
    assert (await waiting).status_code == 503
    assert planner.calls == []


async def test_a_planner_that_keeps_a_worker_makes_no_request_wait(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, queue_seconds=0.2)
    await add_planner(stack, "prefill")
    assert (await stack.http.get("/health")).status_code == 503
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=6)).status_code == 503


async def test_a_bounded_number_of_requests_waits(cluster: Cluster) -> None:
    planner = ToyPlanner("decode")
    await planner.start(cluster._redis_url, cluster.name)
    await eventually(lambda: cluster.fleet.may_be_empty)
    told = asyncio.Event()
    place = WorkerWait(cluster.fleet, max_waiting=1, queue_seconds=0.0, announce=told.set)
    first = asyncio.create_task(place.until_ready(time.monotonic() + PATIENCE))
    await told.wait()
    with pytest.raises(BusyError, match="no worker is ready"):
        await place.until_ready(time.monotonic() + PATIENCE)
    await cluster.add("d")
    await first
    assert await place.until_ready(0.0, waited=3.0) == 3.0  # there is a worker now
    await planner.stop()


async def test_requests_that_are_served_already_take_no_place_of_others(cluster: Cluster) -> None:
    refused: list[tuple[str, str]] = []
    place = WorkerWait(cluster.fleet, 1, 60.0, count_refusal=lambda *refusal: refused.append(refusal))
    late = time.monotonic() + PATIENCE
    served = [asyncio.create_task(place.until_ready(late, is_ordinary=False)) for _ in range(3)]
    await eventually(lambda: len(place) == 3)
    ordinary = asyncio.create_task(place.until_ready(late))
    await eventually(lambda: len(place) == 4)
    with pytest.raises(BusyError, match="no worker is ready"):
        await place.until_ready(late, request_class="chat")
    assert refused == [("chat", "queue_full")]
    await cluster.add("d")
    await asyncio.gather(*served)
    assert 0.0 < await ordinary < PATIENCE


async def test_a_wait_ends_when_the_request_has_waited_long_enough_or_at_its_deadline(cluster: Cluster) -> None:
    place, now = WorkerWait(cluster.fleet, max_waiting=1, queue_seconds=1800.0), time.monotonic()
    with pytest.raises(UnavailableError, match=r"no worker was ready within 1800 seconds; try again later"):
        await place.until_ready(now + PATIENCE, waited=1800.0)
    with pytest.raises(UnavailableError, match=r"no worker was ready before the request's deadline"):
        await place.until_ready(now - 1.0)
    with pytest.raises(UnavailableError, match="deadline"):
        await place.until_ready(now - 1.0, waited=1800.0, is_ordinary=False)


def request_of(age: float = 0.0, waited: float = 0.0, **headers: str) -> Request:
    """Return a request that arrived some seconds ago, and whose client stays."""
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope: Scope = {"type": "http", "headers": named}
    set_scope(scope, toy_scope(arrived=time.monotonic() - age, waited=waited))
    return Request(scope, receive)


async def test_one_time_limit_counts_for_all_waits_of_a_request(
    cluster: Cluster, toy_model: Path, toy_tokenizer: Tokenizer
) -> None:
    config = GatewayConfig(model=str(toy_model), store="none", redis=cluster._redis_url, cluster=cluster.name)
    gateway = Gateway(config, [(config, toy_tokenizer)])
    (model,) = gateway.models.values()
    await model.fleet.start()
    with pytest.raises(UnavailableError, match="deadline"):
        await model.served_model(request_of(age=3.0, x_request_timeout="2.5"))
    with pytest.raises(UnavailableError, match="within 60 seconds"):
        await model.served_model(request_of(waited=60.0))
    with pytest.raises(ApiError, match="X-Request-Timeout must be a number"):
        await model.served_model(request_of(x_request_timeout="soon"))
    request = request_of(waited=5.0)
    planning = asyncio.create_task(model.served_model(request))
    await eventually(lambda: len(model.runner.worker_wait) == 1)
    await cluster.add("d", model=model_digest(toy_model))
    await planning
    assert scope_of(request).waited > 5.0
    assert with_headers(PLAN, request).waited == scope_of(request).waited
    await gateway.close()


async def test_refusals_while_no_worker_is_ready_are_counted(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, max_waiting=1, queue_seconds=60)
    asking = asyncio.create_task(stack.post("/v1/completions", prompt="x"))
    await eventually(lambda: waits_for_worker(stack))
    assert (await stack.post("/v1/completions", prompt="x")).status_code == 429
    metrics = (await stack.http.get("/metrics")).text
    assert re.search(r'requests_refused_total\{[^}]*reason="queue_full"[^}]*\} 1\.0', metrics)
    asking.cancel()


async def test_a_client_that_leaves_gives_its_place_to_others(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, queue_seconds=60)
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
        "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 3}},
    }
    for path, fields in bodies.items():
        asking = asyncio.create_task(stack.post(path, **fields))
        await eventually(lambda: waits_for_worker(stack))
        asking.cancel()
        await eventually(lambda: nobody_waits(stack))


async def waits_for_worker(stack: Stack) -> bool:
    """Return whether a request waits while no worker is ready."""
    metrics = (await stack.http.get("/metrics")).text
    return re.search(r'waiting_by_reason\{[^}]*reason="no_worker"[^}]*\} 1\.0', metrics) is not None


async def nobody_waits(stack: Stack) -> bool:
    return not await waits_for_worker(stack)


async def test_requests_end_with_the_gateway(cluster: Cluster) -> None:
    planner = ToyPlanner("decode")
    await planner.start(cluster._redis_url, cluster.name)
    await eventually(lambda: cluster.fleet.may_be_empty)
    place = WorkerWait(cluster.fleet, max_waiting=1, queue_seconds=0.0)
    waiting = asyncio.create_task(place.until_ready(time.monotonic() + PATIENCE))
    place.abort()
    with pytest.raises(LeavingError):
        await waiting
    await planner.stop()
