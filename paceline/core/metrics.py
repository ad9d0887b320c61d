"""Declarations of metrics. Each metric is named once, in the file that counts it.

A *figure* is a number with a short name, as `/fleet` shows it. A figure may belong to a family, which gives it a name,
a help text and labels in Prometheus' terms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A metric as Prometheus knows it."""

    name: str
    """Name of the metric without the prefix `paceline:` and without a suffix such as `_total`."""
    help: str
    kind: MetricKind = "counter"
    has_role: bool = True
    """Whether the metric has a label with the role of the service. False if only services of one role count this
    metric.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The current value of a figure."""

    figure: str
    """Name of the figure in /fleet; empty if the value is shown only as a part of its family."""
    value: float
    family: Family | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    suffix: str = ""
    """Ending of the family's name for a part of a histogram, such as "_sum"; empty for other metrics."""


def counted(family: Family, **labels: str) -> Any:
    """Return a dataclass field that starts at 0 and belongs to a family."""
    return dataclasses.field(default=0, metadata={"family": family, "labels": labels})


def samples_of(counts: Any) -> Iterator[Sample]:
    """Yield a sample for each field of a dataclass whose value is a number. The field's name is the name of the
    figure.
    """
    for each in dataclasses.fields(counts):
        value = getattr(counts, each.name)
        if isinstance(value, int | float):
            yield Sample(each.name, value, each.metadata.get("family"), each.metadata.get("labels", {}))


class CountHistogram:
    """A histogram of counts, such as tokens: the number of values up to each bound."""

    def __init__(self, family: Family, bounds: tuple[int, ...]) -> None:
        self._family = family
        self._within = dict.fromkeys(bounds, 0)
        self._count = self._sum = 0

    def observe(self, value: int) -> None:
        self._count += 1
        self._sum += value
        for bound in self._within:
            self._within[bound] += value <= bound

    def samples(self) -> Iterator[Sample]:
        for bound, count in self._within.items():
            yield Sample("", count, self._family, {"le": str(float(bound))}, "_bucket")
        yield Sample("", self._count, self._family, {"le": "+Inf"}, "_bucket")
        yield Sample("", self._count, self._family, suffix="_count")
        yield Sample("", self._sum, self._family, suffix="_sum")


class Histogram:
    """A histogram of durations: the number of durations up to each bound.

    Args:
        figure: name of the measured action. The names of the histogram's figures begin with this name.
        bounds_ms: upper bounds in milliseconds.
    """

    def __init__(self, figure: str, family: Family, bounds_ms: tuple[int, ...]) -> None:
        self._figure = figure
        self._family = family
        self._within = dict.fromkeys(bounds_ms, 0)
        self.count = 0
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        for bound in self._within:
            self._within[bound] += seconds * 1000 <= bound

    def samples(self) -> Iterator[Sample]:
        family = self._family
        for bound, count in self._within.items():
            label = {"le": str(bound / 1000)}
            yield Sample(f"{self._figure}s_within_{bound}ms", count, family, label, "_bucket")
        yield Sample("", self.count, family, {"le": "+Inf"}, "_bucket")
        yield Sample(f"{self._figure}s", self.count, family, suffix="_count")
        yield Sample(f"{self._figure}_seconds", self.seconds, family, suffix="_sum")
