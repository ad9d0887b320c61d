"""The search for the cheapest fleet that meets the objectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paceline.core.errors import ConfigError
from paceline.simulator.result import Result
from paceline.simulator.scenario import Scenario

MOST_WORKERS = 4096
"""Most workers of one role that are tried."""

Try = Callable[[Scenario], Result]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A fleet and what became of it."""

    scenario: Scenario
    result: Result

    @property
    def tokens(self) -> int:
        """Tokens of KV that a host holds."""
        return self.scenario.host_tokens or self.scenario.profile.host_tokens


class MissedError(ConfigError):
    """No number of workers meets the objectives."""


def cheapest(scenario: Scenario, attempt: Try) -> Found:
    """Return the fleet with the fewest workers of each role that meets the objectives.

    More workers are assumed to be never worse. First both roles grow until the objectives are met. Then one role after
    the other shrinks as far as they are still met: the dearer one first, and both once more, because a role may need
    fewer workers after the other one has found its number.

    Args:
        scenario: fleet to begin with. A role that it has none of stays without workers.
        attempt: a function that simulates a scenario.

    Raises MissedError if no fleet meets the objectives.
    """
    known: dict[tuple[int, int], Result] = {}

    def attempted(own: Scenario) -> Result:
        counts = own.prefill, own.decode
        if counts not in known:
            known[counts] = attempt(own)
        return known[counts]

    good = -1
    while not (result := attempted(scenario)).is_met:
        before, good = good, sum(own.good for own in result.classes.values())
        if good <= before or max(scenario.prefill, scenario.decode) * 2 > MOST_WORKERS:
            raise MissedError(
                f"{scenario.name} miss the objectives, and more would not help: a single request may take longer than "
                "they allow. Leave out --find to see the result"
            )
        scenario = _with(scenario, scenario.prefill * 2, scenario.decode * 2)
    times = scenario.profile.prefill, scenario.profile.decode
    costs = [own.devices * own.hourly_cost for own in times]
    order = ("prefill", "decode") if costs[0] > costs[1] else ("decode", "prefill")
    for role in (*order, *order):
        scenario = _shrunk(scenario, role, attempted)
    return Found(scenario, attempted(scenario))


def _shrunk(scenario: Scenario, role: str, attempted: Try) -> Scenario:
    """Return the scenario with the fewest workers of a role that meets the objectives, by halving the interval."""
    most = scenario.prefill if role == "prefill" else scenario.decode
    least = min(most, 1)
    best = scenario
    while least < most:
        count = (least + most) // 2
        own = _with(scenario, *((count, scenario.decode) if role == "prefill" else (scenario.prefill, count)))
        if attempted(own).is_met:
            best, most = own, count
        else:
            least = count + 1
    return best


def _with(scenario: Scenario, prefill: int, decode: int) -> Scenario:
    return dataclasses.replace(scenario, prefill=prefill, decode=decode)
