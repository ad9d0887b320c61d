"""A fleet that a planner may leave without decode workers: requests wait for the first one."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import pytest

from paceline.core.errors import BusyError
from paceline.proto.fleet_pb2 import PlanReport
from paceline.services.common.registry import Member
from paceline.services.gateway.errors import LeavingError
from paceline.services.gateway.first_worker import FirstWorker
from tests.services.gateway.conftest import Cluster, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT, ToyWorker

pytestmark = pytest.mark.slow


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


async def test_requests_wait_for_the_first_worker_however_long_it_takes_to_start(start_stack: StartStack) -> None:
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
    place, told = FirstWorker(cluster.fleet, max_waiting=1, queue_seconds=0.0), asyncio.Event()
    place.on_wait = told.set
    first = asyncio.create_task(place.wait(20))
    await told.wait()
    with pytest.raises(BusyError, match="no worker is ready"):
        await place.wait(20)
    await cluster.add("d")
    await first
    await place.wait(0)  # there is a worker now
    await planner.stop()


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
        await eventually(lambda: waits_for_first_worker(stack))
        asking.cancel()
        await eventually(lambda: nobody_waits(stack))


async def waits_for_first_worker(stack: Stack) -> bool:
    """Return whether a request waits while no worker is ready."""
    metrics = (await stack.http.get("/metrics")).text
    return re.search(r'waiting_by_reason\{[^}]*reason="no_worker"[^}]*\} 1\.0', metrics) is not None


async def nobody_waits(stack: Stack) -> bool:
    return not await waits_for_first_worker(stack)


async def test_requests_end_with_the_gateway(cluster: Cluster) -> None:
    planner = ToyPlanner("decode")
    await planner.start(cluster._redis_url, cluster.name)
    await eventually(lambda: cluster.fleet.may_be_empty)
    place = FirstWorker(cluster.fleet, max_waiting=1, queue_seconds=0.0)
    waiting = asyncio.create_task(place.wait(20))
    place.abort()
    with pytest.raises(LeavingError):
        await waiting
    await planner.stop()
