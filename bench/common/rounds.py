"""The figures of several rounds of two systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.serving.load import Round

Rounds = Mapping[str, Sequence[Round]]
"""Rounds by the name of the system. All rounds have the same workloads, groups and figures."""


def values_of(rounds: Sequence[Round], workload: str, group: str, figure: str) -> list[float]:
    """Return the values of one figure in all rounds."""
    return [one[workload][group][figure] for one in rounds]


def figures_of(rounds: Rounds) -> list[tuple[str, str, str]]:
    """Return workload, group and name of each figure that was measured."""
    first = next(iter(rounds.values()))[0]
    return [(workload, group, name) for workload, groups in first.items() for group in groups for name in groups[group]]
