"""The times of a worker's steps by their load, from which the planner learns the capacity of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.planner.distribution import Distribution

MOST_LOADS = 64
"""Largest number of loads that are kept. A new load replaces the load that was seen least recently."""


@dataclass(slots=True)
class StepLoad:
    """All steps with about the same load."""

    number: int
    """Number that identifies the load. All steps with about the same load have the same number."""
    tokens: int = 0
    """Number of tokens that all these steps computed together."""
    context: int = 0
    """Number of tokens whose KV these steps read, summed over the steps."""
    seconds: Distribution = field(default_factory=Distribution)


class StepLoads:
    """Totals of steps by load. Steps have the same load if their tokens are within a factor of two of each other, and
    their contexts within a factor of four.
    """

    def __init__(self) -> None:
        self._loads: dict[int, StepLoad] = {}
        """Loads by number. The most recently seen load is the last one."""

    def count(self, tokens: int, context: int, seconds: float) -> None:
        """Count a step.

        Args:
            tokens: number of tokens that the step computed; if it is 0, the step is not counted.
            context: number of tokens whose KV the step read.
        """
        if not tokens:
            return
        number = tokens.bit_length() << 8 | context.bit_length() // 2
        load = self._loads.pop(number, None) or StepLoad(number)
        self._loads[number] = load
        load.tokens += tokens
        load.context += context
        load.seconds.add(seconds)
        if len(self._loads) > MOST_LOADS:
            del self._loads[next(iter(self._loads))]

    def all(self) -> list[StepLoad]:
        """Return the loads with their totals. Any thread may call this."""
        return list(self._loads.values())
