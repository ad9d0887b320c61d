"""The planner of the compose stack adds and removes containers, while a person changes the roles of some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import flips

from .conftest import Stack

pytestmark = pytest.mark.compose

PLANNED = ("--profile", "planner")


@pytest.fixture
def planned_stack(stack: Stack) -> Iterator[Stack]:
    """The stack with a planner. After it, all workers have the roles of their services again."""
    stack.compose(*PLANNED, "up", "-d", "--no-deps", "planner")
    try:
        stack.wait("planner", lambda: any(each["leads"] for each in stack.fleet()["planners"]))
        yield stack
    finally:
        stack.compose(*PLANNED, "rm", "-sf", "planner")
        stack.compose("restart", "prefill", "decode")


async def test_no_stream_is_lost_or_changed_while_containers_come_and_go(planned_stack: Stack) -> None:
    """See bench/flips.py for 200 actions."""
    tally = await flips.measure(planned_stack.url, "smollm2-135m-instruct", actions=4, count=8, seed=3)
    assert (tally.lost, tally.changed) == ([], [])
    assert tally.compared > 0
