"""The names of adapters in use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UsedNames:
    """Names of adapters that sequences of this gateway use now, in the order of names."""

    running: list[str]
    waiting: list[str]
    slots: int
    """Largest number of adapters in one step of a worker; 0 if workers take none."""
