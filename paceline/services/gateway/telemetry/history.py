"""The last hour in bins of 10 seconds: latencies of requests, and rates and levels of the fleet. Pure.

All instants are of one monotonic clock, in seconds. Memory is bounded: one bin takes at most a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.core.planner.distribution import Distribution

BIN_SECONDS = 10
BINS = 360
"""Number of bins that are kept, which cover one hour."""

SHARES = (0.5, 0.9, 0.99)

Cell = float | None
"""One number in a row of the history; None if there is no value, such as a percentile in a bin without requests."""


class Counters(NamedTuple):
    """Totals of one service since its start."""

    generated_tokens: float = 0
    prompt_tokens: float = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    found_tokens: float = 0
    draft_tokens: float = 0
    accepted_tokens: float = 0


class Levels(NamedTuple):
    """The state of the fleet at one moment."""

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    used_blocks: int = 0
    """Number of KV blocks that running requests use."""
    cached_blocks: int = 0


Service = tuple[str, int]
"""A service's id and its epoch. A service that restarts counts from 0 again, under a new epoch."""

COLUMNS = (
    "running",
    "waiting",
    "generated_tokens_per_s",
    "prompt_tokens_per_s",
    "hit_rate",
    "accepted_rate",
    "kv_used",
    "kv_cached",
    "ended",
    "failed",
    *(f"ttft_p{share * 100:.0f}" for share in SHARES),
    *(f"itl_p{share * 100:.0f}" for share in SHARES),
)
"""Names of the values that follow the time in a row. Names with `_per_s` are rates in units per second, other rates and
shares are from 0 to 1, latencies are in seconds."""


class _Bin:
    """The figures of one bin."""

    __slots__ = ("counters", "ended", "failed", "itl", "levels", "seconds", "ttft")

    def __init__(self) -> None:
        self.ttft = Distribution()
        self.itl = Distribution()
        self.ended = 0
        self.failed = 0
        self.levels: Levels | None = None
        self.counters = Counters()
        """Increase of the fleet's counters over the `seconds` of this bin that samples cover."""
        self.seconds = 0.0


class ConsoleHistory:
    """The bins of the last hour. `take_changed` returns the rows that are new or have changed."""

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self._changed: set[int] = set()
        self._totals: dict[Service, Counters] = {}
        self._sampled_at: float | None = None

    def observe(self, arrived: float, times: Sequence[float], now: float, has_failed: bool) -> None:
        """Add a sequence that has ended.

        Args:
            arrived: instant at which the request arrived.
            times: instants at which messages with tokens came, ascending. A gap counts in the bin in which it ended.
            now: instant at which the sequence ended.
            has_failed: whether the sequence ended with an error.
        """
        last = self._bin(now)
        last.ended += 1
        last.failed += has_failed
        self._drop_old(now)
        if times and times[0] >= self._begin(now):
            self._bin(times[0]).ttft.add(times[0] - arrived)
        for earlier, later in pairwise(times):
            if later >= self._begin(now):
                self._bin(later).itl.add(later - earlier)

    def sample(self, now: float, levels: Levels, totals: Mapping[Service, Counters]) -> None:
        """Add the state of the fleet. Call this every BIN_SECONDS. A sample counts in the bin in which most of the time
        since the previous sample lies.

        The difference of a service's counters to the previous sample counts. A service that is new in this sample
        counts from the next sample on.
        """
        into = self._bin(now - BIN_SECONDS / 2)
        self._drop_old(now)
        into.levels = levels
        if self._sampled_at is not None:
            gains = [_gain(self._totals[name], own) for name, own in totals.items() if name in self._totals]
            into.counters = Counters(*map(sum, zip(into.counters, *gains)))
            into.seconds += now - self._sampled_at
        self._totals, self._sampled_at = dict(totals), now

    def rows(self) -> list[list[Cell]]:
        """Return all rows, oldest first: the number of the bin, then the values of COLUMNS."""
        return [_row(index, self._bins[index]) for index in sorted(self._bins)]

    def take_changed(self) -> list[list[Cell]]:
        """Return the rows that have changed since the last call, oldest first.

        Rows of the past change, too, because a sequence is added when it has ended.
        """
        changed, self._changed = self._changed, set()
        return [_row(index, self._bins[index]) for index in sorted(changed) if index in self._bins]

    def latencies(self, now: float, seconds: float) -> dict[str, dict[str, Cell]]:
        """Return percentiles of TTFT and ITL over the last `seconds`, rounded to bins, and the numbers of durations."""
        recent = [each for index, each in self._bins.items() if index > (now - seconds) // BIN_SECONDS]
        return {
            "ttft": _described(Distribution.merged(each.ttft for each in recent)),
            "itl": _described(Distribution.merged(each.itl for each in recent)),
        }

    def _begin(self, now: float) -> float:
        return (now // BIN_SECONDS - BINS + 1) * BIN_SECONDS

    def _bin(self, instant: float) -> _Bin:
        index = int(instant // BIN_SECONDS)
        self._changed.add(index)
        if (own := self._bins.get(index)) is None:
            own = self._bins[index] = _Bin()
        return own

    def _drop_old(self, now: float) -> None:
        for index in [index for index in self._bins if index * BIN_SECONDS < self._begin(now)]:
            del self._bins[index]
            self._changed.discard(index)


def _gain(before: Counters, now: Counters) -> Counters:
    return Counters(*(max(0.0, later - earlier) for earlier, later in zip(before, now)))


def _row(index: int, own: _Bin) -> list[Cell]:
    levels, gained, seconds = own.levels, own.counters, own.seconds
    blocks = 0 if levels is None else levels.blocks
    return [
        index,
        levels and levels.running,
        levels and levels.waiting,
        _share(gained.generated_tokens, seconds),
        _share(gained.prompt_tokens, seconds),
        _share(gained.found_tokens, gained.prompt_tokens),
        _share(gained.accepted_tokens, gained.draft_tokens),
        _share(levels.used_blocks if levels else 0, blocks),
        _share(levels.cached_blocks if levels else 0, blocks),
        own.ended,
        own.failed,
        *_percentiles(own.ttft),
        *_percentiles(own.itl),
    ]


def _share(part: float, whole: float) -> Cell:
    return round(part / whole, 6) if whole else None


def _percentiles(durations: Distribution) -> list[Cell]:
    """Return the percentiles of durations in seconds, rounded to microseconds."""
    return [round(durations.percentile(share), 6) if durations.counts else None for share in SHARES]


def _described(durations: Distribution) -> dict[str, Cell]:
    values = zip(SHARES, _percentiles(durations))
    return {"count": round(durations.count), **{f"p{share * 100:.0f}": value for share, value in values}}
