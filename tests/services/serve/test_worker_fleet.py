"""Which processes a fleet starts, drains and flips; the processes are toys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.serve.managed_process import ManagedProcess
from paceline.services.serve.worker_fleet import Role, Worker, WorkerFleet


class ToyProcess:
    is_ready = True

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def start(self) -> None:
        pass


class Fleet:
    """A fleet of toys, and what was done to them."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.flipped: list[tuple[str, Role]] = []
        self.refusal: Exception | None = None
        self.during_flip: Callable[[Worker, Role], Awaitable[None]] = lambda worker, role: asyncio.sleep(0)
        self.workers = WorkerFleet(
            lambda worker: cast(ManagedProcess, ToyProcess(worker)),
            lambda process: asyncio.create_task(asyncio.sleep(0)),
            self._drain,
            self._flip,
            lambda added: None,
            lambda line: None,
        )

    async def _drain(self, process: ManagedProcess) -> None:
        self.drained.append(cast(Any, process).worker.name)

    async def _flip(self, worker: Worker, role: Role) -> None:
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

    async def give_up(worker: Worker, role: Role) -> None:
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
