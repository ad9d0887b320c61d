"""Requests and stand-in workers for `bench.fleet.planner`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.reports import Role, State


@dataclass(eq=False)
class Request:
    name: str
    arrived: float
    prompt: int
    answer: int
    first: float = 0.0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Times between tokens on earlier workers, each with its number of tokens."""
    done: int = 0
    """Number of tokens that earlier workers have generated."""
    decode: Worker | None = None
    joined: int = 0
    """Number of its worker's steps when it joined."""


@dataclass(eq=False)
class Worker:
    name: str
    role: Role
    state: State = "starting"
    since: float = 0.0
    started: float = 0.0
    queue: deque[Request] = field(default_factory=deque)
    is_busy: bool = False
    reserved: int = 0
    """Number of requests that have a place here while their prompt is computed."""
    running: dict[Request, None] = field(default_factory=dict)
    base: int = 0
    """Sum of contexts of running requests, less the worker's steps for each of them."""
    steps: float = 0.0
    at: float = 0.0
    epoch: int = 0
    """Grows with every change of the batch, so that events of an earlier batch are ignored."""
    history: list[tuple[float, float, float]] = field(default_factory=list)
    """Steps before, number of steps, and the time of each: newest last."""
    batches: dict[int, tuple[float, float, Distribution]] = field(default_factory=dict)
    """Sums of tokens and contexts, and times of the steps since the last report, by size."""

    @property
    def load(self) -> int:
        return self.reserved + len(self.running)

    @property
    def context(self) -> float:
        return self.base + len(self.running) * self.steps

    def note(self, tokens: float, context: float, seconds: float, times: float) -> None:
        """Count steps for the next report."""
        before = self.batches.setdefault(int(tokens).bit_length(), (0.0, 0.0, Distribution()))
        before[2].add(seconds, times)
        self.batches[int(tokens).bit_length()] = (before[0] + tokens * times, before[1] + context * times, before[2])
