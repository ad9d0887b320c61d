"""A worker falls asleep when its requests have ended, and wakes again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paceline.core.errors import BusyError, DrainingError, InvalidRequestError
from paceline.proto.fleet_pb2 import Sleep
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.worker_role import WorkerRole
from paceline.services.worker.worker_sleep import WorkerSleep


class ToyWorker:
    """The part of a worker that its sleep needs."""

    def __init__(self) -> None:
        self.admission = WorkerAdmission(4)
        self.done: list[str] = []
        self.refusal: InvalidRequestError | None = None
        self.failure: Exception | None = None
        self.fails_at = ""
        """The one thing that fails; empty if everything does."""
        self.told: list[str] = []
        self.role = WorkerRole("decode", 20.0, self._tell)
        self.sleep = WorkerSleep(self, self.role)

    async def _tell(self, ready: bool) -> None:
        self.told.append(self.admission.state)

    def check_sleep(self, wish: Sleep) -> None:
        if self.refusal is not None and (wish.weights or wish.kv_cache):
            raise self.refusal

    async def _do(self, what: str) -> None:
        assert not self.admission.active
        await asyncio.sleep(0)
        if self.failure is not None and self.fails_at in ("", what):
            raise self.failure
        self.done.append(what)

    async def sleep_weights(self, level: int) -> None:
        await self._do(f"weights {level}")

    async def wake_weights(self) -> None:
        await self._do("weights")

    async def sleep_blocks(self) -> None:
        await self._do("no blocks")

    async def wake_blocks(self) -> None:
        await self._do("blocks")


ASLEEP, AWAKE = Sleep(weights=1, kv_cache=True, mode="wait", changed=1), Sleep(changed=2)


@pytest.fixture
async def worker() -> ToyWorker:
    return ToyWorker()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_sleeps_and_wakes(worker: ToyWorker) -> None:
    await worker.sleep.set(ASLEEP)
    assert worker.sleep.state == ASLEEP
    assert worker.done == ["no blocks", "weights 1"]
    with pytest.raises(BusyError, match="sleeps"):
        await worker.admission.admit().__aenter__()
    with pytest.raises(BusyError, match="wake it before"):
        worker.role.change(worker, "prefill", 0)  # type: ignore[arg-type]
    await worker.sleep.set(AWAKE)
    assert worker.done[2:] == ["blocks", "weights"]
    assert worker.told[0] == "sleeping"
    assert worker.told[-1] == "ready"
    async with worker.admission.admit():
        pass


async def test_it_lets_its_requests_end_and_takes_no_new_ones(worker: ToyWorker) -> None:
    async with worker.admission.admit():
        sleeping = asyncio.create_task(worker.sleep.set(ASLEEP))
        await until(lambda: worker.admission.state == "sleeping")
        with pytest.raises(BusyError):
            await worker.admission.admit().__aenter__()
        await asyncio.sleep(0.2)
        assert not worker.done
        assert not sleeping.done()
    await sleeping
    assert worker.sleep.state.weights == 1


async def test_requests_that_are_kept_leave_the_worker_which_then_has_a_new_epoch(worker: ToyWorker) -> None:
    before, left = worker.role.epoch, asyncio.Event()

    async def run() -> None:
        with pytest.raises(DrainingError):
            async with worker.admission.admit():
                await asyncio.sleep(60)
        left.set()

    running = asyncio.create_task(run())
    await until(lambda: worker.admission.active == 1)
    await worker.sleep.set(Sleep(weights=1, kv_cache=True, mode="keep", changed=1))
    assert left.is_set()
    assert worker.admission.state == "sleeping"
    assert worker.role.epoch > before
    with pytest.raises(DrainingError):
        worker.role.check(before)
    await running


async def test_a_newer_wish_ends_the_wait_for_requests(worker: ToyWorker) -> None:
    async with worker.admission.admit():
        sleeping = asyncio.create_task(worker.sleep.set(ASLEEP))
        await until(lambda: worker.admission.state == "sleeping")
        await worker.sleep.set(AWAKE)
        await sleeping
        assert not worker.done
        assert worker.admission.state == "ready"
    await worker.sleep.set(ASLEEP)  # this message came late
    assert not worker.done
    assert worker.admission.state == "ready"


async def test_parts_wake_one_by_one(worker: ToyWorker) -> None:
    await worker.sleep.set(ASLEEP)
    await worker.sleep.set(Sleep(kv_cache=True, changed=2))
    assert (worker.done[2:], worker.admission.state) == (["weights"], "sleeping")
    await worker.sleep.set(Sleep(changed=3))
    assert (worker.done[3:], worker.admission.state) == (["blocks"], "ready")


async def test_a_deeper_sleep_needs_no_waking(worker: ToyWorker) -> None:
    await worker.sleep.set(ASLEEP)
    await worker.sleep.set(Sleep(weights=2, kv_cache=True, changed=2))
    assert worker.done[2:] == ["weights 2"]


async def test_a_worker_that_cannot_sleep_goes_on(worker: ToyWorker) -> None:
    worker.refusal = InvalidRequestError("it has its own weights")
    for wish in (ASLEEP, Sleep(kv_cache=True, changed=2)):
        with pytest.raises(InvalidRequestError):
            await worker.sleep.set(wish)
    async with worker.admission.admit():
        pass


async def test_a_wish_that_failed_may_be_repeated(worker: ToyWorker) -> None:
    await worker.sleep.set(ASLEEP)
    worker.failure = BusyError("too little memory")
    with pytest.raises(BusyError):
        await worker.sleep.set(AWAKE)
    assert worker.admission.state == "sleeping"
    worker.failure = None
    await worker.sleep.set(AWAKE)
    assert worker.admission.state == "ready"


async def test_a_worker_that_failed_tells_when_its_sleep_was_wanted_and_by_whom(worker: ToyWorker) -> None:
    await worker.sleep.set(Sleep(weights=1, kv_cache=True, by_itself=True, changed=1))
    worker.failure, worker.fails_at = BusyError("too little memory"), "weights"
    for _ in range(2):
        with pytest.raises(BusyError):
            await worker.sleep.set(AWAKE)
        assert worker.sleep.state == Sleep(weights=1, by_itself=True, changed=1)


async def test_an_operator_takes_over_a_sleep_that_a_request_would_end(worker: ToyWorker) -> None:
    await worker.sleep.set(Sleep(weights=1, kv_cache=True, by_itself=True, changed=1))
    wish = Sleep(weights=1, kv_cache=True, changed=2)
    await worker.sleep.set(wish)
    assert worker.sleep.state == wish
    assert worker.done == ["no blocks", "weights 1"]


async def test_a_worker_whose_blocks_cannot_sleep_has_all_of_them_again(worker: ToyWorker) -> None:
    worker.failure, worker.fails_at = BusyError("blocks are in use"), "no blocks"
    with pytest.raises(BusyError):
        await worker.sleep.set(ASLEEP)
    assert worker.done == ["blocks"]
    assert worker.admission.state == "ready"
    worker.failure = None
    await worker.sleep.set(ASLEEP)
    assert worker.done[1:] == ["no blocks", "weights 1"]


async def test_a_worker_whose_blocks_are_gone_takes_no_requests(worker: ToyWorker) -> None:
    worker.failure = BusyError("too little memory")
    with pytest.raises(BusyError):
        await worker.sleep.set(ASLEEP)
    assert worker.admission.state == "sleeping"
    worker.failure = None
    await worker.sleep.set(AWAKE)
    assert worker.done == ["blocks"]


async def test_a_draining_worker_does_not_fall_asleep(worker: ToyWorker) -> None:
    worker.admission.begin_drain()
    with pytest.raises(DrainingError):
        await worker.sleep.set(Sleep(weights=1, mode="keep", changed=1))
    assert worker.admission.draining
    assert not worker.done
