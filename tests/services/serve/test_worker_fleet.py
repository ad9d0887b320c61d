"""Which processes a fleet starts, drains and flips; the processes are toys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.serve import worker_fleet
from paceline.services.serve.managed_process import ManagedProcess
from paceline.services.serve.worker_fleet import Role, ServedWorker, WorkerFleet


class ToyProcess:
    def __init__(self, worker: ServedWorker, is_ready: bool) -> None:
        self.worker = worker
        self.is_ready = is_ready

    async def start(self) -> None:
        pass


class Fleet:
    """A fleet of toys, and what was done to them."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.supervised: list[str] = []
        self.starts_at_once = True
        self.processes: dict[str, ToyProcess] = {}
        self.flipped: list[tuple[str, Role]] = []
        self.refusal: Exception | None = None
        self.during_flip: Callable[[ServedWorker, Role], Awaitable[None]] = lambda worker, role: asyncio.sleep(0)
        self.workers = WorkerFleet(
            self._make,
            self._supervise,
            self._drain,
            self._flip,
            lambda added: None,
            lambda line: None,
            ("prefill", "decode", "encode"),
        )

    def _make(self, worker: ServedWorker) -> ManagedProcess:
        self.processes[worker.name] = ToyProcess(worker, self.starts_at_once)
        return cast(ManagedProcess, self.processes[worker.name])

    def _supervise(self, process: ManagedProcess) -> asyncio.Task[None]:
        self.supervised.append(cast(Any, process).worker.name)
        return asyncio.create_task(asyncio.sleep(0))

    async def _drain(self, process: ManagedProcess) -> None:
        self.drained.append(cast(Any, process).worker.name)

    async def _flip(self, worker: ServedWorker, role: Role) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.flipped.append((worker.name, role))
        await self.during_flip(worker, role)

    def wanted(self) -> Mapping[str, int]:
        return {role: state["wanted"] for role, state in self.workers.state().items() if state["wanted"]}


async def fleet(**targets: int) -> Fleet:
    made = Fleet()
    await made.workers.scale(cast(dict[Role, int], targets))
    return made


async def test_victims_leave_first_and_then_the_youngest() -> None:
    own = await fleet(decode=5)
    await own.workers.scale({"decode": 4}, ["decode-2", "decode-0"])
    await asyncio.sleep(0)
    assert own.drained == ["decode-2"]
    own.drained.clear()
    await own.workers.scale({"decode": 1}, ["gone", "decode-1", "prefill-9", "decode-0"])
    await asyncio.sleep(0)
    assert set(own.drained) == {"decode-0", "decode-1", "decode-4"}
    assert own.wanted() == {"decode": 1}


async def test_workers_that_do_not_serve_yet_leave_first() -> None:
    """So `scale decode=2` and then `decode=1`, before the second one is ready, keeps the one that serves."""
    own = await fleet(prefill=1, decode=1)
    own.starts_at_once = False
    await own.workers.scale({"decode": 3})
    await own.workers.scale({"decode": 2}, ["decode-0"])
    await own.workers.scale({"decode": 1})
    await asyncio.sleep(0)
    assert own.drained == ["decode-2", "decode-1"]
    own.processes["decode-0"].is_ready = False  # it has ended and starts again
    await own.workers.scale({"decode": 0})
    await asyncio.sleep(0)
    assert own.drained == ["decode-2", "decode-1", "decode-0"]


@pytest.mark.parametrize("end", ["ready", "failed", "unwanted"])
async def test_the_last_worker_that_serves_drains_when_another_one_serves(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_fleet, "LOOK_SECONDS", 0.001)
    own = await fleet(decode=1)
    own.starts_at_once = False
    await own.workers.scale({"decode": 3})
    await own.workers.drain(["decode-0", "decode-2"])
    await asyncio.sleep(0.02)
    assert (own.drained, own.wanted()) == (["decode-2"], {"decode": 1})
    assert own.workers.state()["decode"]["draining"] == 1
    if end == "ready":
        own.processes["decode-1"].is_ready = True
    elif end == "failed":
        own.processes["decode-0"].is_ready = False
    else:
        await own.workers.scale({"decode": 0})
    async with asyncio.timeout(10.0):
        while "decode-0" not in own.drained:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("role", ["prefill", "decode", "encode"])
async def test_a_worker_that_waits_to_drain_stays_if_its_replacement_is_given_up(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_fleet, "LOOK_SECONDS", 0.001)
    own = await fleet(**{role: 1})
    own.starts_at_once = False
    await own.workers.scale({role: 3})
    await own.workers.drain([f"{role}-0"])
    for name in (f"{role}-1", f"{role}-2"):
        assert own.workers.give_up(cast(ManagedProcess, own.processes[name]))
    await asyncio.sleep(0.02)
    assert own.drained == []
    assert own.workers.state()[role] == {"wanted": 1, "ready": 1, "draining": 0, "given_up": 2}
    assert own.supervised[-1] == f"{role}-0"
    await own.workers.scale({role: 0})
    await asyncio.sleep(0.02)
    assert own.drained == [f"{role}-0"]


async def test_the_only_worker_is_not_given_up() -> None:
    own = await fleet(prefill=1, decode=2)
    await own.workers.drain(["decode-0"])
    await asyncio.sleep(0)  # decode-1 is ready, so decode-0 drains
    assert not any(own.workers.give_up(cast(ManagedProcess, own.processes[name])) for name in own.processes)
    assert own.wanted() == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_flip_leaves_a_worker_that_serves(role: Role) -> None:
    own = await fleet(prefill=1, decode=1)
    own.starts_at_once = False
    await own.workers.scale({role: 2})
    other: Role = "decode" if role == "prefill" else "prefill"
    with pytest.raises(ConfigError, match=f"{role}-1 does not serve yet"):
        await own.workers.flip({f"{role}-0": other})
    assert own.flipped == []
    own.processes[f"{role}-1"].is_ready = True
    await own.workers.flip({f"{role}-0": other})
    assert own.wanted() == {role: 1, other: 2}


async def test_a_worker_drains_by_its_name_and_all_names_must_be_known() -> None:
    own = await fleet(prefill=2, decode=1)
    with pytest.raises(ConfigError, match="no worker nobody"):
        await own.workers.drain(["prefill-0", "nobody"])
    assert own.wanted() == {"prefill": 2, "decode": 1}
    await own.workers.drain(["prefill-0"])
    await asyncio.sleep(0)
    assert (own.drained, own.wanted()) == (["prefill-0"], {"prefill": 1, "decode": 1})


async def test_a_flip_counts_in_both_roles_and_lasts_over_a_restart() -> None:
    own = await fleet(prefill=2, decode=1)
    await own.workers.flip({"prefill-1": "decode", "decode-0": "decode"})
    assert (own.flipped, own.wanted()) == ([("prefill-1", "decode")], {"prefill": 1, "decode": 2})
    await own.workers.flip({"prefill-1": "prefill"})  # back again
    assert own.wanted() == {"prefill": 2, "decode": 1}
    await own.workers.flip({"prefill-1": "decode"})
    await own.workers.scale({"decode": 0}, ["decode-0"])
    await asyncio.sleep(0)
    assert sorted(own.drained) == ["decode-0", "prefill-1"]


async def test_a_flip_that_a_worker_refuses_changes_nothing() -> None:
    own = await fleet(prefill=1, decode=2)
    own.refusal = UnavailableError("it drains")
    with pytest.raises(UnavailableError, match="it drains"):
        await own.workers.flip({"decode-0": "prefill"})
    assert own.wanted() == {"prefill": 1, "decode": 2}


async def test_a_worker_that_is_given_up_during_its_flip_is_an_error() -> None:
    own = await fleet(prefill=2, decode=1)

    async def give_up(worker: ServedWorker, role: Role) -> None:
        assert own.workers.give_up(worker.process)

    own.during_flip = give_up
    with pytest.raises(ConfigError, match="prefill-0 was given up"):
        await own.workers.flip({"prefill-0": "decode"})
    assert own.wanted() == {"prefill": 1, "decode": 1}


async def test_the_last_decode_worker_stays_one() -> None:
    own = await fleet(prefill=1, decode=1)
    for flips in ({"decode-0": "prefill"}, {"decode-0": "prefill", "prefill-0": "decode"}):
        with pytest.raises(ConfigError, match="no decode worker would be left"):
            await own.workers.flip(cast(dict[str, Role], flips))
    assert not own.flipped
