"""A worker changes its role: it drains first, and refuses what was meant for its earlier roles."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import (
    BusyError,
    DrainingError,
    InvalidRequestError,
    PacelineError,
    StaleError,
    UnavailableError,
)
from paceline.services.common.registry import Role
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.worker_role import WorkerRole


class ToyWorker:
    """The part of a worker that a change of its role needs."""

    def __init__(self) -> None:
        self.admission = WorkerAdmission(4)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.taken: list[Role] = []
        self.error: Exception | None = None

    async def take_role(self, role: Role) -> None:
        assert not self.admission.active
        if self.error is not None:
            raise self.error
        self.taken.append(role)


class Told:
    """What the cluster is told: False at the begin of a change, True at its end."""

    def __init__(self) -> None:
        self.ready: list[bool] = []
        self.changed = asyncio.Event()

    async def __call__(self, ready: bool) -> None:
        self.ready.append(ready)
        if ready:
            self.changed.set()


def make(role: Role = "prefill", drain_seconds: float = 20.0) -> tuple[WorkerRole, ToyWorker, Told]:
    told = Told()
    return WorkerRole(role, drain_seconds, told), ToyWorker(), told


async def changed(told: Told) -> None:
    async with asyncio.timeout(20):
        await told.changed.wait()


async def test_it_drains_and_then_serves_in_its_new_role_under_a_new_epoch() -> None:
    role, worker, told = make()
    before = role.epoch
    async with worker.admission.admit():
        after = role.change(worker, "decode", before)
        assert (role.name, role.epoch) == ("prefill", before)
        with pytest.raises(DrainingError):
            await worker.admission.admit().__aenter__()  # refused from this very moment
        await asyncio.sleep(0.01)
        assert told.ready == [False]
    await changed(told)
    assert (role.name, role.epoch, worker.taken) == ("decode", after, ["decode"])
    assert after > before
    async with worker.admission.admit():
        pass


async def test_what_was_sent_to_an_earlier_epoch_or_needs_another_role_is_refused() -> None:
    role, worker, told = make()
    first = role.epoch
    role.check(first, "prefill")
    role.check(0, "prefill")
    second = role.change(worker, "decode", 0)
    await changed(told)
    for epoch, wanted in ((first, "decode"), (first, None), (second, "prefill"), (0, "prefill")):
        with pytest.raises(DrainingError):
            role.check(epoch, wanted)  # type: ignore[arg-type]
    role.check(second, "decode")
    role.check(second + 1, "decode")  # of a process that was here before, which this one cannot know


async def test_a_standby_worker_takes_no_work_until_it_has_a_role() -> None:
    role, worker, told = make("standby")
    for wanted in ("prefill", "decode", None):
        with pytest.raises(DrainingError):
            role.check(0, wanted)
    role.change(worker, "decode", role.epoch)
    await changed(told)
    role.check(role.epoch, "decode")


async def test_asking_twice_changes_it_once() -> None:
    role, worker, told = make()
    assert role.change(worker, "prefill", 0) == role.epoch
    async with worker.admission.admit():
        after = role.change(worker, "decode", 0)
        assert role.change(worker, "decode", 0) == after
        with pytest.raises(BusyError, match="about to become decode"):
            role.change(worker, "standby", 0)
    await changed(told)
    assert role.change(worker, "decode", 0) == after
    assert worker.taken == ["decode"]


@pytest.mark.parametrize(
    ("wanted", "older", "error"),
    [("encode", 0, InvalidRequestError), ("", 0, InvalidRequestError), ("decode", 1, StaleError)],
)
async def test_what_cannot_be_is_refused(wanted: str, older: int, error: type[PacelineError]) -> None:
    role, worker, _ = make()
    with pytest.raises(error):
        role.change(worker, wanted, role.epoch - older)
    assert not worker.admission.draining


async def test_a_worker_that_ends_does_not_change_its_role() -> None:
    role, worker, _ = make()
    async with worker.admission.admit():
        role.change(worker, "decode", 0)
        await role.stop()
        with pytest.raises(DrainingError):
            role.change(worker, "decode", 0)  # the change that was asked for before never comes
    assert (role.name, worker.taken) == ("prefill", [])
    assert worker.admission.draining
    other, draining, _ = make()
    draining.admission.begin_drain()
    with pytest.raises(DrainingError):
        other.change(draining, "decode", 0)


async def test_requests_that_outlive_the_drain_are_ended_and_told_why() -> None:
    role, worker, told = make(drain_seconds=0.0)

    async def request() -> None:
        async with worker.admission.admit():
            await asyncio.sleep(20)

    running = asyncio.create_task(request())
    await asyncio.sleep(0)
    role.change(worker, "decode", 0)
    with pytest.raises(DrainingError):
        await running
    await changed(told)
    assert role.name == "decode"


async def test_a_change_that_fails_ends_the_worker() -> None:
    role, worker, _ = make()
    worker.error = RuntimeError("no such turns")
    role.change(worker, "decode", 0)
    with pytest.raises(UnavailableError, match="no such turns"):
        await asyncio.wait_for(worker.failed, 20)
    assert worker.admission.draining
