"""How requests wait for workers. test_trouble.py tests what a client sees of workers that fail later."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.config import GatewayConfig
from paceline.core.context import Context
from paceline.core.errors import BusyError, UnavailableError
from paceline.core.types import FinishReason
from paceline.services.gateway.queueing import admission_queue
from paceline.services.gateway.routing.prefix_index import PrefixIndex
from paceline.services.gateway.sequences.notices import PlacementLog
from paceline.services.gateway.sequences.progress import Ended, Event, Generated
from paceline.services.gateway.sequences.runner import SequenceRunner
from paceline.services.gateway.sequences.sequence import SequenceRun
from tests.services.gateway.conftest import PATIENCE, Cluster, eventually
from tests.services.gateway.toy_plans import toy_sequence

BROKEN = UnavailableError("kvtransfer does not answer")


def runner_of(cluster: Cluster, queue_seconds: float = 0.3) -> SequenceRunner:
    config = GatewayConfig(queue_seconds=queue_seconds, stall_seconds=PATIENCE, local_prefill_tokens=0)
    return SequenceRunner(config, cluster.fleet, PlacementLog(cluster.redis, cluster.name), PrefixIndex())


class Request:
    """A request that runs in the background."""

    def __init__(self, runner: SequenceRunner, request_id: str = "r", follows: bool = False) -> None:
        self.events: list[Event] = []
        request = toy_sequence(request_id=request_id, index=int(follows))
        self.task = asyncio.create_task(self._run(runner, request))

    async def _run(self, runner: SequenceRunner, request: SequenceRun) -> Event:
        await runner.run(request, self.events.append)
        return self.events[-1]

    def has_begun(self) -> bool:
        return any(isinstance(event, Generated) for event in self.events)


@pytest.mark.slow
@pytest.mark.parametrize("follows", [False, True])
async def test_who_finds_only_workers_that_cannot_serve_learns_why(cluster: Cluster, follows: bool) -> None:
    (await cluster.add("d")).refusal = BROKEN
    with pytest.raises(UnavailableError, match="decode worker d: kvtransfer does not answer"):
        await Request(runner_of(cluster), follows=follows).task


@pytest.mark.slow
async def test_who_finds_a_full_worker_beside_a_broken_one_waits_for_room(cluster: Cluster) -> None:
    (await cluster.add("d1")).refusal = BROKEN
    await cluster.add("d2", max_seqs=0)
    with pytest.raises(BusyError, match="no worker had room"):
        await Request(runner_of(cluster)).task


@pytest.mark.slow
async def test_a_prefill_worker_that_is_known_to_be_full_is_busy_too(cluster: Cluster) -> None:
    await cluster.add("d")
    await cluster.add("p1", "prefill", max_seqs=1)
    with cluster.fleet.call(cluster.fleet.worker("p1")), pytest.raises(BusyError, match="no worker had room"):
        await Request(runner_of(cluster)).task


@pytest.mark.slow
async def test_a_patient_request_waits_longer_than_the_others_for_full_workers(cluster: Cluster) -> None:
    worker = await cluster.add(max_seqs=0)
    runner = runner_of(cluster)
    patient = Request(runner, follows=True)
    await eventually(lambda: bool(worker.calls))
    with pytest.raises(BusyError):
        await Request(runner, "other").task
    worker.max_seqs = 1
    assert await patient.task == Ended(FinishReason.LENGTH)


@pytest.mark.parametrize("is_full", [False, True])
async def test_what_a_request_has_waited_before_counts_against_its_limit(cluster: Cluster, is_full: bool) -> None:
    if is_full:
        await cluster.add("d", max_seqs=0)
    sequence = toy_sequence(waited=1000.0)
    error, message = (BusyError, "no worker had room") if is_full else (UnavailableError, "no worker was ready")
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(error, match=f"{message} within 1000 seconds"):
            await runner_of(cluster, queue_seconds=1000.0).run(sequence, lambda event: None)


async def test_the_end_of_a_prompt_is_known_with_its_first_token(cluster: Cluster) -> None:
    decode, prefixes = await cluster.add("d"), PrefixIndex()
    decode.pause_after = 1
    config = GatewayConfig(stall_seconds=PATIENCE)
    runner = SequenceRunner(config, cluster.fleet, PlacementLog(cluster.redis, cluster.name), prefixes)
    prompt, events = list(range(40)), list[Event]()
    sequence = toy_sequence(prompt, dropped_tokens=2)
    running = asyncio.create_task(runner.run(sequence, events.append))
    await eventually(lambda: any(isinstance(event, Generated) for event in events))
    assert prefixes.ends(Context([*prompt[:38], *prompt])) == [38]
    decode.resume.set()
    await running
    assert prefixes.ends(Context(sequence.context.token_ids)) == [38, 40, 48]


async def test_a_handoff_lets_the_next_request_in(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "POLL_SECONDS", (PATIENCE, PATIENCE))
    decode, prefill = await cluster.add("d"), await cluster.add("p", "prefill", max_seqs=1)
    decode.pause_after = prefill.pause_after = 1
    runner = runner_of(cluster, queue_seconds=2 * PATIENCE)
    first = Request(runner, "first")
    await eventually(first.has_begun)
    second = Request(runner, "second")
    await eventually(lambda: len(runner.queue) == 1)
    prefill.resume.set()
    await eventually(second.has_begun)
    assert not first.task.done()
    decode.resume.set()
    assert await first.task == await second.task == Ended(FinishReason.LENGTH)
