"""Loads that are described by a few numbers in a TOML or JSON file, for `paceline simulate --load`.

seconds = 600
seed = 1

[arrivals]                              # of conversations; later turns follow by themselves
process = "poisson"                     # or "even", or "bursts" of `burst` at once
schedule = [[0, 2.0], [300, 8.0]]       # (second, conversations per second from then on); or rate = 2.0

[[requests]]                            # one table for each kind of conversation
class = "chat"
key = "app"                             # API key; keys share what there is if requests wait
priority = 0                            # lower is more urgent
weight = 3                              # share of the conversations, relative to the other kinds
prompt = {median = 300, p99 = 3000}     # new tokens of each turn; or a number, or {least = 100, most = 500}
answer = {median = 150, p99 = 800}
prefix = {tokens = 512, kinds = 4}      # every conversation begins with one of 4 system prompts
turns = 3                               # mean number of turns; each repeats the conversation so far
think = {median = 30, p99 = 300}        # seconds from one turn to the next
adapters = {count = 100, zipf = 1.0}    # each conversation has one of 100 adapters, the first ones most often
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import tomllib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.simulator.trace import LoadTrace, TraceRequest

_P99 = 2.3263
"""The 99th percentile of the standard normal distribution."""
_INDEX_BITS = 24
"""Bits of a block's name for its index in the context. The higher bits number its conversation or system prompt."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Uniform(_Table):
    """A uniform distribution: every value from `least` to `most` is equally likely."""

    least: Positive
    most: Positive

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.least > self.most:
            raise ValueError("least must not be above most")
        return self

    def draw(self, source: random.Random) -> float:
        return source.uniform(self.least, self.most)


class Skewed(_Table):
    """A log-normal distribution, which has a long tail, given by its median and its 99th percentile."""

    median: Positive
    p99: Positive

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.median > self.p99:
            raise ValueError("the median must not be above p99")
        return self

    def draw(self, source: random.Random) -> float:
        return self.median * math.exp(source.gauss(0, math.log(self.p99 / self.median) / _P99))


Amount = Positive | Uniform | Skewed
_AMOUNTS = ("prompt", "answer", "think")
_AMOUNT_ADVICE = (
    "give a number above 0, or {least = 100, most = 500}, or {median = 300, p99 = 3000}, in ascending order"
)


def _draw(amount: Amount, source: random.Random) -> float:
    return amount if isinstance(amount, float) else amount.draw(source)


def _draw_tokens(amount: Amount, source: random.Random) -> int:
    return max(1, round(_draw(amount, source)))


class ArrivalPattern(_Table):
    """The process and the rate with which conversations begin."""

    process: Literal["poisson", "even", "bursts"] = "poisson"
    rate: Positive | None = None
    """Conversations that begin per second; None if `schedule` is given."""
    schedule: tuple[tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]], ...] = ()
    """Pairs (second, conversations per second from then on), in order; empty if `rate` is given."""
    burst: int = Field(default=1, ge=1)
    """Number of conversations that begin at the same instant; above 1 only for bursts."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.rate is None) == (not self.schedule):
            raise ValueError("give either rate or schedule")
        if any(before[0] >= after[0] for before, after in itertools.pairwise(self.schedule)):
            raise ValueError("the seconds of schedule must ascend")
        if self.burst > 1 and self.process != "bursts":
            raise ValueError('burst needs process = "bursts"')
        return self

    def times(self, seconds: float, source: random.Random) -> Iterator[float]:
        """Yield the instants at which conversations begin, in order, up to `seconds`."""
        steps = self.schedule or ((0.0, self.rate or 0.0),)
        ends = [begin for begin, _ in steps[1:]] + [seconds]
        for (begin, rate), end in zip(steps, ends):
            at = begin
            while rate and (at := at + self._gap(rate, source)) < min(end, seconds):
                yield from itertools.repeat(at, self.burst)

    def _gap(self, rate: float, source: random.Random) -> float:
        rate /= self.burst
        return 1 / rate if self.process == "even" else source.expovariate(rate)


class Prefix(_Table):
    """System prompts with which conversations begin."""

    tokens: int = Field(ge=1)
    kinds: int = Field(default=1, ge=1)
    """Number of different system prompts."""


class Adapters(_Table):
    """Adapters of conversations. Number n is chosen with a chance that is proportional to 1 / n ** zipf."""

    count: int = Field(ge=1)
    zipf: float = Field(default=1.0, ge=0, allow_inf_nan=False)


class RequestKind(_Table):
    """One kind of conversation, and its share of all conversations."""

    group: str = Field(default="", alias="class")
    key: str = ""
    priority: int = 0
    weight: Positive = 1.0
    prompt: Amount
    answer: Amount
    prefix: Prefix | None = None
    adapters: Adapters | None = None
    turns: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    think: Amount = 10.0


class DescribedLoad(_Table):
    """A load, described by its arrivals and its kinds of requests. Equal descriptions make equal requests."""

    seconds: Positive
    """Length of the period in which conversations begin, in seconds."""
    seed: int = 0
    max_model_len: int = Field(default=32_768, ge=2)
    """A conversation ends before its context would be longer than this, in tokens."""
    arrivals: ArrivalPattern
    requests: tuple[RequestKind, ...] = Field(min_length=1)

    def trace(self) -> LoadTrace:
        """Return the requests. They are made again each time when the trace is read, so a long one needs no memory."""
        return LoadTrace(BASE_TOKENS, _Requests(self))


class _Requests:
    def __init__(self, load: DescribedLoad) -> None:
        self._load = load

    def __iter__(self) -> Iterator[TraceRequest]:
        """Merge the turns of all conversations in the order of their arrivals."""
        load = self._load
        source = random.Random(load.seed)
        # A system prompt has other blocks with each adapter.
        prefixes = list(itertools.accumulate(map(_prefixes_of, load.requests), initial=1))
        chances = [_chances_of(kind) for kind in load.requests]
        weights = [kind.weight for kind in load.requests]
        later: list[tuple[float, int, TraceRequest, _Conversation]] = []
        for number, at in enumerate(load.arrivals.times(load.seconds, source), prefixes[-1]):
            while later and later[0][0] <= at:
                yield _next_of(later)
            (which,) = source.choices(range(len(weights)), weights)
            kind = load.requests[which]
            first = 0 if kind.prefix is None else prefixes[which] + source.randrange(kind.prefix.kinds)
            own, adapter = random.Random(f"{load.seed}/{number}"), 0
            if kind.adapters is not None:
                (adapter,) = own.choices(range(1, kind.adapters.count + 1), cum_weights=chances[which])
                first += (adapter - 1) * (kind.prefix.kinds if kind.prefix else 0)
            talk = _Conversation(kind, own, number, first, load.max_model_len, adapter)
            if (turn := talk.turn(at)) is not None:
                heapq.heappush(later, (at, number, turn, talk))
        while later:
            yield _next_of(later)


def _prefixes_of(kind: RequestKind) -> int:
    """Return the number of different beginnings of a kind's conversations."""
    return (kind.prefix.kinds if kind.prefix else 0) * (kind.adapters.count if kind.adapters else 1)


def _chances_of(kind: RequestKind) -> list[float]:
    """Return the sums of the chances of a kind's adapters up to each of them, relative to that of the first."""
    if kind.adapters is None:
        return []
    return list(itertools.accumulate(n**-kind.adapters.zipf for n in range(1, kind.adapters.count + 1)))


class _Conversation:
    """The turns of one conversation.

    Args:
        number: distinguishes it from all other conversations and system prompts.
        prefix: number of its system prompt; 0 without one.
        adapter: number of its adapter; 0 without one.
    """

    def __init__(
        self, kind: RequestKind, source: random.Random, number: int, prefix: int, max_model_len: int, adapter: int
    ) -> None:
        self._kind, self._source, self._number, self._prefix = kind, source, number, prefix
        self._adapter = adapter
        self._most = max_model_len
        self._context = kind.prefix.tokens if kind.prefix else 0

    def turn(self, at: float) -> TraceRequest | None:
        """Return the next turn, which arrives at `at`; None if it would be too long."""
        kind, source = self._kind, self._source
        prompt = self._context + _draw_tokens(kind.prompt, source)
        answer = _draw_tokens(kind.answer, source)
        if prompt + answer > self._most:
            return None
        self._context = prompt + answer
        session = str(self._number) if kind.turns > 1 else ""
        names = self._blocks(), kind.group, session, kind.key
        return TraceRequest(at, prompt, answer, *names, kind.priority, self._adapter)

    def after(self, at: float) -> float | None:
        """Return the arrival of the turn after the one at `at`, in seconds; None if there is none."""
        kind, source = self._kind, self._source
        goes_on = source.random() < 1 - 1 / kind.turns
        return at + _draw(kind.think, source) if goes_on else None

    def _blocks(self) -> array[int]:
        shared = self._kind.prefix.tokens // BASE_TOKENS if self._kind.prefix else 0
        names = (
            (self._prefix if index < shared else self._number) << _INDEX_BITS | index for index in itertools.count()
        )
        return array("Q", itertools.islice(names, self._context // BASE_TOKENS))


def _next_of(later: list[tuple[float, int, TraceRequest, _Conversation]]) -> TraceRequest:
    """Remove and return the earliest turn, and put its conversation's next turn in its place."""
    at, number, turn, talk = heapq.heappop(later)
    then = talk.after(at)
    if then is not None and (next_turn := talk.turn(then)) is not None:
        heapq.heappush(later, (then, number, next_turn, talk))
    return turn


def read_load(path: Path) -> DescribedLoad:
    """Read a described load: JSON if the file's name ends with .json, else TOML. Raises ConfigError."""
    try:
        text = path.read_text("utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return DescribedLoad.model_validate(values)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, message = first["loc"], first["msg"]
        if place[2:3] and place[2] in _AMOUNTS:  # a union gives one error for each of its forms, which would confuse
            place, message = place[:3], _AMOUNT_ADVICE
        where = ".".join(map(str, place)) or "the load"
        raise ConfigError(f"{path}: {where}: {message}; docs/operations/simulating.md shows an example") from None
    except ValueError as error:
        raise ConfigError(f"{path} is neither TOML nor JSON that can be read: {error}") from None
