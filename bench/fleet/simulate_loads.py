"""Loads with which a simulation is compared with a real stack: conversations with their times, made from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.common.workloads import make_workload

FIRST_ID, END_ID = 1000, 30_000
"""Token ids of prompts. Lower ids are special tokens and single bytes in most tokenizers."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation. Its prompt is the conversation so far, and then its own tokens."""

    tokens: tuple[int, ...]
    answer_tokens: int
    after: float = 0.0
    """Seconds from the end of the previous turn to this one."""


@dataclass(frozen=True, slots=True)
class Talk:
    at: float
    """Seconds from the begin of the load to the first turn."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    talks: tuple[Talk, ...]
    aggregated: bool = False
    """Whether the stack has one worker that computes prompts, too."""


class _Source(random.Random):
    def tokens(self, least: int, most: int) -> tuple[int, ...]:
        return tuple(self.choices(range(FIRST_ID, END_ID), k=self.randint(least, most)))

    def arrivals(self, rate: float, seconds: float) -> Iterator[float]:
        at = self.expovariate(rate)
        while at < seconds:
            yield at
            at += self.expovariate(rate)


def _single(rate: float, prompt: tuple[int, int], answer: tuple[int, int]) -> Callable[[_Source, float], list[Talk]]:
    """Return a maker of requests without a history: Poisson arrivals and uniform lengths."""

    def make(source: _Source, seconds: float) -> list[Talk]:
        times = source.arrivals(rate, seconds)
        return [Talk(at, (Turn(source.tokens(*prompt), source.randint(*answer)),)) for at in times]

    return make


def _conversations(source: _Source, seconds: float) -> list[Talk]:
    """Make conversations of one to six turns, after one of three system prompts of 256 tokens."""
    systems = [source.tokens(256, 256) for _ in range(3)]

    def turns() -> Iterator[Turn]:
        yield Turn(source.choice(systems) + source.tokens(20, 80), source.randint(24, 64))
        for _ in range(source.randint(0, 5)):
            yield Turn(source.tokens(20, 80), source.randint(24, 64), source.uniform(1, 4))

    return [Talk(at, tuple(turns())) for at in source.arrivals(0.3, 0.8 * seconds)]


def _bursts(source: _Source, seconds: float) -> list[Talk]:
    """Make six requests at once, about every eight seconds."""
    times = (at for at in source.arrivals(1 / 8, seconds) for _ in range(6))
    return [Talk(at, (Turn(source.tokens(64, 192), source.randint(24, 64)),)) for at in times]


def _bursts_of_32(source: _Source, seconds: float) -> list[Talk]:
    """Make the requests of the workload burst-32 every 20 seconds, so that prompts of all lengths share steps."""
    bursts = [make_workload("burst-32", source.getrandbits(32)) for _ in range(math.ceil(seconds / 20))]
    return [
        Talk(20.0 * number, (Turn(request.prompt, request.max_tokens),))
        for number, burst in enumerate(bursts)
        for request in burst.requests
    ]


_mixed = _single(1.2, (32, 700), (24, 96))

_LOADS: dict[str, Callable[[_Source, float], list[Talk]]] = {
    "short chats": _single(1.2, (40, 200), (32, 96)),
    "long prompts": _single(0.35, (800, 1800), (8, 24)),
    "conversations": _conversations,
    "bursts": _bursts,
    "burst-32": _bursts_of_32,
    "long answers": _single(0.8, (24, 64), (150, 350)),
    "mixed, aggregated": _mixed,
}
LOADS = tuple(_LOADS)
_AGGREGATED = "mixed, aggregated"


def make_load(name: str, seconds: float, seed: int) -> Load:
    """Return the load `name` of LOADS, whose talks begin within `seconds`."""
    return Load(name, tuple(_LOADS[name](_Source(f"{name}/{seed}"), seconds)), name == _AGGREGATED)
