"""The search for the cheapest fleet that meets the objectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paceline.core.errors import ConfigError
from paceline.simulator.result import Result
from paceline.simulator.scenario import Scenario

MOST_WORKERS = 4096
"""Largest number of workers of one role that the search tries."""
FASTER = 0.02
"""Least relative gain in speed from more workers. If the gain is smaller, the search adds no further workers."""

Try = Callable[[Scenario], Result]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A simulated fleet and its result."""

    scenario: Scenario
    result: Result

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV a host can hold."""
        return self.scenario.host_tokens or self.scenario.profile.host_tokens


class MissedError(ConfigError):
    """No number of workers that the search tried meets the objectives."""


def cheapest(scenario: Scenario, attempt: Try) -> Found:
    """Return the fleet with the fewest workers of each role that meets the objectives.

    More workers are assumed to be never worse. First both roles grow until the objectives are met. Then one role after
    the other shrinks as far as the objectives are still met. The more expensive role shrinks first, and both are tried
    once more, because a role may need fewer workers after the other role has its final number.

    Args:
        scenario: fleet to begin with. A role without workers stays without workers.
        attempt: a function that simulates a scenario.

    Raises MissedError if no fleet meets the objectives.
    """
    known: dict[tuple[int, int], Result] = {}

    def attempted(candidate: Scenario) -> Result:
        counts = candidate.prefill, candidate.decode
        if counts not in known:
            known[counts] = attempt(candidate)
        return known[counts]

    before: Result | None = None
    while not (result := attempted(scenario)).is_met:
        is_stuck = before is not None and not _is_better(result, before)
        before = result
        if is_stuck or max(scenario.prefill, scenario.decode) * 2 > MOST_WORKERS:
            raise MissedError(
                f"{scenario.name} miss the objectives, and more would not help: a single request may take longer than "
                "they allow, or be too long for a worker. Leave out --find to see the result"
            )
        scenario = _with(scenario, scenario.prefill * 2, scenario.decode * 2)
    times = scenario.profile.prefill, scenario.profile.decode
    costs = [each.devices * each.hourly_cost for each in times]
    order = ("prefill", "decode") if costs[0] > costs[1] else ("decode", "prefill")
    for role in (*order, *order):
        scenario = _shrunk(scenario, role, attempted)
    return Found(scenario, attempted(scenario))


def _is_better(result: Result, before: Result) -> bool:
    """Return whether more workers served more requests, or served them faster, even if objectives are still missed."""
    good, finished, seconds = _served(result)
    good_before, finished_before, seconds_before = _served(before)
    return good > good_before or finished > finished_before or seconds < (1 - FASTER) * seconds_before


def _served(result: Result) -> tuple[int, int, float]:
    """Return the number of requests that met their objectives, the number that got an answer, and the total seconds of
    answered requests.
    """
    classes = result.classes.values()
    return (
        sum(each.good for each in classes),
        sum(each.finished for each in classes),
        sum(each.finished * each.seconds.mean for each in classes),
    )


def _shrunk(scenario: Scenario, role: str, attempted: Try) -> Scenario:
    """Return the scenario with the fewest workers of a role that meets the objectives, by halving the interval."""
    most = scenario.prefill if role == "prefill" else scenario.decode
    least = min(most, 1)
    best = scenario
    while least < most:
        count = (least + most) // 2
        smaller = _with(scenario, *((count, scenario.decode) if role == "prefill" else (scenario.prefill, count)))
        if attempted(smaller).is_met:
            best, most = smaller, count
        else:
            least = count + 1
    return best


def _with(scenario: Scenario, prefill: int, decode: int) -> Scenario:
    return dataclasses.replace(scenario, prefill=prefill, decode=decode)
