"""Prompts are computed on one host and continued on another one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bench.namespaces import ONE_HOST
from tests.services.kvtransfer.transports import missing
from tests.stack.cluster import Cluster

pytestmark = [pytest.mark.model, pytest.mark.stack]

PROMPT = " ".join(f"{number} riders in a pace line take turns at the front." for number in range(40))
"""549 tokens: more than a step takes, and no more than are needed for transfers while others compute."""


@pytest.fixture(params=["grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    """How blocks go between the hosts."""
    if why := missing(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture
async def cluster(tmp_path: Path, real_model: Callable[[str], Path], transport: str) -> AsyncIterator[Cluster]:
    """Host 0 will prefill, host 1 decodes."""
    model = real_model("smollm2-135m-instruct")
    with Cluster(tmp_path, model, ONE_HOST, lease_seconds=4.0, transport=transport) as running:
        decode = running.start_worker("decode", 0, host=1)
        running.start_gateway()
        running.wait_ready(decode)
        await running.wait_workers(1)
        yield running


async def answer(cluster: Cluster, prompt: str) -> str:
    """Of blocks that have come wrong the first few tokens tell."""
    return await cluster.stream(prompt=prompt, max_tokens=32)


async def transfers(cluster: Cluster) -> dict[str, float]:
    """What has come to host 1, as of its last report."""
    hosts = [each for each in (await cluster.fleet())["workers"] if each["worker_id"] == "host-1"]
    return {name: value for name, value in hosts[0]["stats"].items() if name.startswith("transfer")}


@pytest.mark.parametrize("transport", ["grpc", "ucx"], indirect=True)
async def test_a_prompt_computed_elsewhere_gives_the_same_tokens(cluster: Cluster, transport: str) -> None:
    expected = [await answer(cluster, PROMPT + end) for end in ("", " And", " But then")]
    cluster.wait_ready(cluster.start_worker("prefill", 0, host=0))
    await cluster.wait_workers(2)

    # What decode has in its cache from before is neither computed again nor moved; of the new prompt everything is.
    new = "A new beginning. "
    assert await answer(cluster, PROMPT) == expected[0]
    texts = await asyncio.gather(*(answer(cluster, new + PROMPT + str(number)) for number in range(4)))
    await cluster.settled()
    async with asyncio.timeout(10):
        while (seen := await transfers(cluster)).get(f"transfers_{transport}", 0) < 4:
            await asyncio.sleep(0.1)
    assert seen["transfer_failures"] == 0
    assert seen["transfer_bytes"] > 4 * 500 / 16 * 368_640 * 0.5  # four prompts of some 500 tokens

    # Without the other host decode computes them itself, and comes to the same.
    assert cluster.processes.pop("prefill-0").stop() == 0
    await cluster.wait_workers(1)
    again = await asyncio.gather(*(answer(cluster, new + PROMPT + str(number)) for number in range(4)))
    assert again == texts


@pytest.mark.parametrize(
    ("victim", "transport"), [("kvtransfer-0", "ucx"), ("kvtransfer-1", "grpc")], indirect=["transport"]
)
async def test_a_death_amid_a_transfer_is_not_seen(cluster: Cluster, victim: str) -> None:
    expected = await answer(cluster, PROMPT)
    cluster.wait_ready(cluster.start_worker("prefill", 0, host=0))
    await cluster.wait_workers(2)
    async with asyncio.timeout(120):
        tasks = [asyncio.create_task(answer(cluster, f"{number} {PROMPT}")) for number in range(3)]
        while not any(ledger["in_flight"] for ledger in (await cluster.fleet())["hosts"]):
            await asyncio.sleep(0.02)
        cluster.processes[victim].popen.kill()
        if victim == "kvtransfer-1":  # without it nothing goes on; its worker and its memory are still there
            cluster.processes[victim].popen.wait(10)
            cluster.start_again("kvtransfer-1")
        texts = await asyncio.gather(*tasks)
    again = [await answer(cluster, f"{number} {PROMPT}") for number in range(3)]
    assert texts == again
    assert await answer(cluster, PROMPT) == expected
    await cluster.settled()


async def test_a_host_that_stands_still_stops_nobody(cluster: Cluster) -> None:
    cluster.wait_ready(cluster.start_worker("prefill", 0, host=0))
    await cluster.wait_workers(2)
    expected = await answer(cluster, PROMPT)
    # The service of host 0 stands still: its worker lives, and nothing can be read from it.
    cluster.processes["kvtransfer-0"].popen.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            assert await answer(cluster, PROMPT) == expected
            second = await answer(cluster, f"1 {PROMPT}")
    finally:
        cluster.processes["kvtransfer-0"].popen.send_signal(signal.SIGCONT)
    await cluster.settled()
    assert await answer(cluster, f"1 {PROMPT}") == second
