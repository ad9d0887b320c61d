"""Prompts are computed on one host and decoded on another one."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from bench.common.namespaces import ONE_HOST
from bench.serving.equality import shorten
from tests.services.kvtransfer.transport_cases import missing
from tests.stack.cluster import TOKENS, Cluster

pytestmark = [pytest.mark.model, pytest.mark.stack]

PROMPT = " ".join(f"{number} riders in a pace line take turns at the front." for number in range(40))
"""549 tokens. They need more than one step, so blocks are transferred while others are computed."""
LAYERS = 8
BLOCK_BYTES = 16 * LAYERS * 2 * 3 * 64 * 2
"""Bytes of a block: 16 tokens with keys and values of 3 heads of 64 numbers in bf16."""


# TLS is for gRPC alone, so test_tls.py has a cluster with the other transport.
@pytest.fixture(scope="module", params=["ucx", pytest.param("grpc", marks=pytest.mark.thorough)])
def transport(request: pytest.FixtureRequest) -> str:
    """Name of the transport between the hosts."""
    if why := missing(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture(scope="module")
def hosts(
    tmp_path_factory: pytest.TempPathFactory, real_model: Callable[[str], Path], transport: str
) -> Iterator[Cluster]:
    """Two hosts, with a decode worker on host 1."""
    folder = tmp_path_factory.mktemp("hosts")
    shorten(real_model("smollm2-135m-instruct"), LAYERS, folder / "model")
    with Cluster(folder, folder / "model", ONE_HOST, lease_seconds=4.0, transport=transport) as running:
        running.wait_ready(running.start_worker("decode", 0, host=1))
        running.start_gateway()
        yield running


@pytest.fixture
async def cluster(hosts: Cluster) -> AsyncIterator[Cluster]:
    """The two hosts without a prefill worker. A test may start one on host 0, and a second decode worker, and kill
    services; they run again afterwards.
    """
    await hosts.wait_workers(1)
    yield hosts
    for name in ("prefill-0", "decode-1"):
        if name in hosts.processes:
            hosts.processes.pop(name).stop()
    for name, process in list(hosts.processes.items()):
        if not process.alive:
            hosts.start_again(name)


async def answer(cluster: Cluster, prompt: str) -> str:
    """Return the first tokens of an answer. They differ if blocks were transferred wrongly."""
    return await cluster.stream(prompt=prompt, max_tokens=32)


async def transfers(cluster: Cluster, host: int = 1) -> dict[str, float]:
    """Return the transfer counters of a host as of its last report."""
    hosts = [each for each in (await cluster.fleet())["workers"] if each["worker_id"] == f"host-{host}"]
    return {name: value for name, value in hosts[0]["stats"].items() if name.startswith("transfer")}


async def test_a_prompt_computed_elsewhere_gives_the_same_tokens(cluster: Cluster, transport: str) -> None:
    expected = [await answer(cluster, PROMPT + end) for end in ("", " And", " But then")]
    cluster.wait_ready(cluster.start_worker("prefill", 0, host=0))
    await cluster.wait_workers(2)

    # Blocks that the decode host has cached are neither computed again nor transferred. All blocks of a new prompt are.
    # No two new prompts begin alike: if the beginning of one has just been cached, it needs no transfer.
    new = [f"{number} new beginnings. {PROMPT}" for number in range(4)]
    assert await answer(cluster, PROMPT) == expected[0]
    texts = await asyncio.gather(*(answer(cluster, prompt) for prompt in new))
    await cluster.settled()
    for _ in range(100):
        if (seen := await transfers(cluster)).get(f"transfers_{transport}", 0) >= 4:
            break
        await asyncio.sleep(0.1)
    assert seen.get(f"transfers_{transport}", 0) >= 4, seen
    assert seen["transfer_failures"] == 0
    assert seen["transfer_bytes"] > 4 * 500 / 16 * BLOCK_BYTES * 0.5  # four prompts of about 500 tokens

    # Without the other host the decode worker computes the prompts itself, and the tokens are the same.
    assert cluster.processes.pop("prefill-0").stop() == 0
    await cluster.wait_workers(1)
    again = await asyncio.gather(*(answer(cluster, prompt) for prompt in new))
    assert again == texts


@pytest.mark.parametrize("victim", ["kvtransfer-0", pytest.param("kvtransfer-1", marks=pytest.mark.thorough)])
async def test_a_client_does_not_notice_a_death_amid_a_transfer(cluster: Cluster, victim: str) -> None:
    """vLLM #52234 and #48633: after a failed transfer, answers with 200 had the tokens of another prompt."""
    expected = await answer(cluster, PROMPT)
    cluster.wait_ready(cluster.start_worker("prefill", 0, host=0))
    await cluster.wait_workers(2)
    async with asyncio.timeout(120):
        tasks = [asyncio.create_task(answer(cluster, f"{number} {PROMPT}")) for number in range(3)]
        while not any(ledger["in_flight"] for ledger in (await cluster.fleet())["hosts"]):
            await asyncio.sleep(0.02)
        cluster.processes[victim].popen.kill()
        if victim == "kvtransfer-1":  # Requests need it. Its worker still runs, and its arena still exists.
            cluster.processes[victim].popen.wait(10)
            cluster.start_again("kvtransfer-1")
        texts = await asyncio.gather(*tasks)
    again = [await answer(cluster, f"{number} {PROMPT}") for number in range(3)]
    assert texts == again
    assert await answer(cluster, PROMPT) == expected
    await cluster.settled()


async def test_no_request_hangs_after_a_peer_has_restarted(cluster: Cluster, transport: str) -> None:
    """Dynamo #13088: 36 of 1,536 requests hung after a restart of the peer. vLLM #49238: old connections crashed.

    The fault: the worker and the service of the other host are killed and start again under the same names, amid
    requests, after connections to them have been used.
    """
    cluster.wait_ready(cluster.start_worker("prefill", 0, host=0))
    await cluster.wait_workers(2)
    async with asyncio.timeout(180):
        await answer(cluster, f"Before. {PROMPT}")
        running = [asyncio.create_task(answer(cluster, f"{number} amid. {PROMPT}")) for number in range(3)]
        await asyncio.sleep(0.1)
        for name in ("prefill-0", "kvtransfer-0"):
            cluster.processes[name].popen.kill()
            cluster.processes[name].popen.wait(10)
        for name in ("kvtransfer-0", "prefill-0"):
            cluster.start_again(name)
        cluster.wait_ready("prefill-0")
        await cluster.wait_workers(2)
        before = (await transfers(cluster)).get(f"transfers_{transport}", 0)
        prompts = [f"{number} after. {PROMPT}" for number in range(8)]
        texts = await asyncio.gather(*running, *(answer(cluster, prompt) for prompt in prompts))
        # The new peer is used, if not at once: a transport that failed while it started is set aside for a while.
        for number in itertools.count():
            if (await transfers(cluster)).get(f"transfers_{transport}", 0) > before:
                break
            await answer(cluster, f"{number} later. {PROMPT}")
        again = [await answer(cluster, prompt) for prompt in prompts[:2]]
    assert texts[3:5] == again
    await cluster.settled()


async def test_a_host_that_stands_still_stops_nobody(cluster: Cluster) -> None:
    """vLLM #50754, SGLang #36108 and #35360: a transfer that never starts was waited for 30 to 300 seconds.

    The fault: the service that would send the blocks takes connections and answers nothing.
    """
    cluster.wait_ready(cluster.start_worker("prefill", 0, host=0))
    await cluster.wait_workers(2)
    prompt = f"A host that sleeps. {PROMPT}"
    expected = await answer(cluster, prompt)
    # The service of host 0 is stopped: its worker runs on, but nobody can read the host's blocks.
    cluster.processes["kvtransfer-0"].popen.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            assert await answer(cluster, prompt) == expected
            second = await answer(cluster, f"Again. {prompt}")
    finally:
        cluster.processes["kvtransfer-0"].popen.send_signal(signal.SIGCONT)
    await cluster.settled()
    assert await answer(cluster, f"Again. {prompt}") == second


async def test_the_last_worker_of_a_host_leaves_requests_and_hot_prefixes_to_another_host(
    cluster: Cluster, transport: str
) -> None:
    prompt = f"A host that leaves. {PROMPT}"
    expected = await cluster.stream(prompt=prompt, max_tokens=2 * TOKENS)
    for _ in range(2):
        await answer(cluster, f"Hot is what comes twice. {PROMPT}")
    cluster.wait_ready(cluster.start_worker("decode", 1, host=0))
    await cluster.wait_workers(2)
    leaving = cluster.processes["decode-0"]  # it has the prompt in its host's cache, so it gets the request

    def on_token(count: int) -> None:
        if count == 8:
            leaving.tell()

    assert await cluster.stream(on_token, prompt, 2 * TOKENS, request_id="moves") == expected
    assert leaving.wait() == 0
    assert await cluster.decodes("moves") == "decode-1"
    for _ in range(100):
        if (seen := await transfers(cluster, host=0)).get(f"transfers_{transport}", 0) >= 2:
            break
        await asyncio.sleep(0.1)
    assert seen.get(f"transfers_{transport}", 0) >= 2, seen  # the request's KV, and the hot prefix
    await cluster.settled()
