"""The loads of `bench.fleet.planner`, each with the fleet that serves it and the objectives that it should keep."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from bench.fleet import planner_live
from bench.fleet.planner_fleet import GPU, STAND_IN, Machine
from paceline.core.planner.objectives import Objectives


class Arrival(NamedTuple):
    """A request as it arrives."""

    at: float
    """Seconds since the beginning."""
    name: str
    """Name of its class."""
    prompt: int
    answer: int


class Case(NamedTuple):
    """Requests, the workers that serve them, and the objectives."""

    arrivals: list[Arrival]
    machine: Machine
    budget: int
    """Devices, one for each worker."""
    ttft: float
    itl: float
    interval: float
    """Seconds between two decisions."""
    forecast: float
    """Seconds between two forecasts."""

    def objectives(self) -> Objectives:
        """Return the objectives of a planner."""
        return planner_live.objectives(self.budget, self.ttft, self.itl, self.interval, self.forecast)


class Kind(NamedTuple):
    """Requests of one class: mean lengths, and their rate when the load is at this extreme."""

    name: str
    prompt: int
    answer: int
    rate: float


DOCUMENTS, CHATS = Kind("documents", 3500, 100, 9.0), Kind("chats", 250, 700, 11.0)

_SHARES: dict[str, Callable[[float], float]] = {
    "swing": lambda at: 0.5 + 0.5 * math.cos(2 * math.pi * at / 1200),
    "steps": lambda at: float(at % 1200 < 600),
}
"""Share of documents by the time in seconds; the rest are chats."""
LOADS = (*_SHARES, "live")


def make_case(load: str, minutes: int, seed: int) -> Case:
    """Return one of the loads. "live" has the requests, objectives and step times of `bench.fleet.planner_live`."""
    if load == "live":
        requests = planner_live.load(minutes, seed).requests
        arrivals = [Arrival(each.at, "default", len(each.prompt), each.max_tokens) for each in requests]
        live = planner_live
        return Case(arrivals, STAND_IN, live.BUDGET, live.TTFT, live.ITL, live.INTERVAL, live.FORECAST)
    arrivals = _swing(_SHARES[load], 60.0 * minutes, seed)
    return Case(arrivals, GPU, budget=8, ttft=2.0, itl=0.045, interval=5.0, forecast=30.0)


def _swing(share_at: Callable[[float], float], seconds: float, seed: int) -> list[Arrival]:
    draw, gaps = random.Random(seed), random.Random(seed + 1)
    arrivals, at = list[Arrival](), 0.0
    while at < seconds:
        share = share_at(at)
        rate = share * DOCUMENTS.rate + (1 - share) * CHATS.rate
        kind = DOCUMENTS if draw.random() * rate < share * DOCUMENTS.rate else CHATS
        prompt, answer = (max(2, round(mean * draw.lognormvariate(-0.08, 0.4))) for mean in (kind.prompt, kind.answer))
        arrivals.append(Arrival(at, kind.name, prompt, answer))
        at += gaps.expovariate(rate)
    return arrivals
