"""Services started one by one, as in a cluster. Some of them are killed while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from tests.stack.chaos_clients import Client, Report, completions
from tests.stack.cluster import TOKENS, Cluster
from tests.stack.processes import arenas
from tests.stack.reference import PROMPTS

pytestmark = [pytest.mark.model, pytest.mark.stack]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, real_model: Callable[[str], Path]) -> Iterator[Cluster]:
    """A cluster with a prefill worker and two decode workers. After the tests its shared memory must be gone."""
    running = Cluster(tmp_path_factory.mktemp("cluster"), real_model("smollm2-135m-instruct"))
    try:
        names = [running.start_worker(*worker) for worker in (("prefill", 0), ("decode", 0), ("decode", 1))]
        running.start_gateway()
        running.wait_ready(*names)
        yield running
    finally:
        shared = arenas(running.family())
        running.close()
    assert len(shared) == 1
    assert not shared.pop().exists()


@pytest.fixture
async def cluster(services: Cluster) -> Cluster:
    """The cluster, in which processes that an earlier test ended run again. Redis restarts first."""
    dead = [name for name, process in services.processes.items() if not process.alive]
    for name in sorted(dead, key="redis".__ne__):
        services.start_again(name)
    services.wait_ready(*(name for name in dead if name != "redis"))
    await services.wait_workers(3)
    return services


async def test_streams_go_on_at_another_gateway(cluster: Cluster) -> None:
    name = cluster.start_gateway()
    other = cluster.processes[name]
    other.wait_for(" serving ")
    report, questions = Report(), completions(PROMPTS[:4])
    at_doomed = httpx.AsyncClient(base_url=cluster.url_of(name), headers=cluster.admin, timeout=120)  # the same key
    async with cluster.client(120) as http, at_doomed as doomed:
        client = Client(doomed, questions, TOKENS, report, gateways_end=True, others=[http])
        await client.learn(len(questions))
        sampled = {"prompt": PROMPTS[0], "temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True}
        answers = [await each.post("/v1/completions", json=sampled) for each in (http, doomed)]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1]
        assert await client.read_all(cluster.processes.pop(name).popen.kill) == client.expected
        assert report.reconnected == len(questions)
    other.wait()
    await cluster.settled()


async def test_streams_go_on_over_the_death_of_workers_and_of_redis(cluster: Cluster) -> None:
    expected = await cluster.stream()

    # Redis is flushed and then stopped while requests run.
    async with asyncio.timeout(120):
        running = [asyncio.create_task(cluster.stream()) for _ in range(3)]
        await asyncio.sleep(0.5)
        with redis.Redis.from_url(cluster.redis_url) as client:
            client.flushall()
        await asyncio.sleep(0.5)
        cluster.processes["redis"].stop()
        assert await asyncio.gather(*running) == [expected] * 3
    assert await cluster.stream() == expected

    # A decode worker is killed while it runs requests.
    async with asyncio.timeout(120):
        begun = asyncio.Event()
        doomed = asyncio.create_task(cluster.stream(lambda count: begun.set(), request_id="doomed"))
        other = asyncio.create_task(cluster.stream(request_id="other"))
        await begun.wait()
        victim = await cluster.decodes("doomed")
        cluster.processes[victim].popen.kill()
        assert await asyncio.gather(doomed, other) == [expected] * 2
    traces = [await cluster.trace(name) for name in ("doomed", "other")]
    assert [line for line in traces[0] if "  FAILED " in line and f"decode worker {victim}" in line]
    tried = [sum("  attempt " in line for line in lines) for lines in traces]
    assert tried[0] > 1
    for lines, count in zip(traces, tried):
        assert lines[-1].endswith(f"length; {TOKENS} tokens in {count} attempt{'s' if count > 1 else ''}")
        assert any("0 bytes moved, path: shared memory" in line for line in lines)

    # Without a prefill worker, the decode worker computes prompts.
    cluster.processes["prefill-0"].popen.kill()
    assert await cluster.stream() == expected

    await cluster.settled()  # the blocks of the killed workers are released


# `make test` has drains in test_scaling.py and test_hosts.py, and a fleet without workers in test_models.py and
# test_planner.py.
@pytest.mark.thorough
async def test_workers_come_and_go_until_none_is_there(cluster: Cluster) -> None:
    expected = await cluster.stream()
    cluster.wait_ready(cluster.start_worker("decode", 2))
    await cluster.wait_workers(4)

    # A draining worker finishes its requests and takes no new ones.
    async with asyncio.timeout(180):
        running = [asyncio.create_task(cluster.stream()) for _ in range(6)]
        await asyncio.sleep(1.0)
        codes = await asyncio.gather(
            *(asyncio.to_thread(cluster.processes.pop(name).stop) for name in ("decode-0", "prefill-0"))
        )
        assert await asyncio.gather(*running) == [expected] * 6
    assert codes == [0, 0]
    await cluster.wait_workers(2)
    assert await cluster.stream() == expected

    # Without a decode worker requests wait until one starts.
    for name in ("decode-1", "decode-2"):
        assert cluster.processes.pop(name).stop() == 0
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as client:
        async with asyncio.timeout(10):
            while (await client.get("/health")).status_code != 503:
                await asyncio.sleep(0.1)
    async with asyncio.timeout(120):
        waiting = asyncio.create_task(cluster.stream())
        await asyncio.sleep(1.0)
        assert not waiting.done()
        cluster.wait_ready(cluster.start_worker("decode", 5))
        assert await waiting == expected
