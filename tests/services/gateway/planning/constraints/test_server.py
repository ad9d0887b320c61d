"""The processes that try constraints: whose they are, and how long they live."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import pytest

from paceline.core.errors import InvalidRequestError
from tests.services.gateway.planning.constraints.desk import Desk, children, object_schema, until


def processes(desk: Desk) -> set[int]:
    assert desk.compiler.pid is not None
    return set(children(desk.compiler.pid))


async def test_a_process_goes_on_with_trials_of_its_owner_alone(desk: Desk) -> None:
    await desk.make("a", guided_regex="a")
    first = processes(desk)
    assert len(first) == 1
    await desk.make("a", guided_regex="b")
    assert processes(desk) == first
    await desk.make("b", guided_regex="a")
    assert len(processes(desk)) == 2
    assert first < processes(desk)


async def test_the_process_that_has_waited_longest_makes_room(desk: Desk) -> None:
    for owner in "abcd":
        await desk.make(owner, guided_regex="a")
    four = processes(desk)
    await desk.make("a", guided_regex="b")
    await desk.make("e", guided_regex="a")
    assert len(processes(desk)) == 4
    assert len(processes(desk) - four) == 1
    kept = processes(desk)
    await desk.make("a", guided_regex="c")
    assert processes(desk) == kept  # it was not the one of `a` that ended


async def test_a_failed_constraint_ends_no_process(desk: Desk) -> None:
    await desk.make("a", guided_regex="a")
    first = processes(desk)
    with pytest.raises(InvalidRequestError):
        await desk.make("a", guided_regex="(")
    assert processes(desk) == first


async def test_a_slow_trial_is_the_last_one_of_its_process(desk: Desk) -> None:
    await desk.make("a", guided_regex="a")
    assert desk.compiler.pid is not None
    (child,) = processes(desk)
    trial = asyncio.create_task(desk.make("a", **object_schema(20)))
    await until(lambda: desk.compiler.trials == 2)
    os.kill(child, signal.SIGSTOP)
    await asyncio.sleep(0.25)
    os.kill(child, signal.SIGCONT)
    assert await trial is not None
    await until(lambda: child not in processes(desk))
    assert await desk.make("a", guided_regex="b")


async def test_a_process_that_has_grown_ends(desk: Desk) -> None:
    desk.compiler._limits = dataclasses.replace(desk.compiler._limits, memory=24 << 20)
    desk.compiler._forget()  # the next process has the new limits
    await desk.make("a", guided_regex="a")
    (child,) = processes(desk)
    await desk.make("a", **object_schema(250))
    await until(lambda: child not in processes(desk))


async def test_a_process_that_ends_gets_no_other_trial(desk: Desk) -> None:
    desk.compiler._limits = dataclasses.replace(desk.compiler._limits, memory=24 << 20)
    desk.compiler._forget()  # the next process has the new limits
    for number in range(10):
        await desk.make("a", **object_schema(250 + number))  # it has grown, and ends
        await desk.make("a", guided_regex="a" * (number + 1))
    assert desk.compiler.trials == 20  # none was done again


async def test_a_process_that_was_killed_while_it_waited_is_no_outage(desk: Desk) -> None:
    await desk.make("a", guided_regex="a")
    (child,) = processes(desk)
    os.kill(child, signal.SIGKILL)
    await until(lambda: not processes(desk))
    assert await desk.make("a", guided_regex="b")


async def test_a_trial_whose_process_is_just_being_killed_goes_to_another(desk: Desk) -> None:
    await desk.make("a", guided_regex="a")
    (child,) = processes(desk)
    os.kill(child, signal.SIGSTOP)  # so that the trial waits for it
    trial = asyncio.create_task(desk.make("a", guided_regex="b"))
    await until(lambda: desk.compiler.trials == 2)
    await asyncio.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert await trial is not None
    assert desk.compiler.trials == 2
    assert child not in processes(desk)
