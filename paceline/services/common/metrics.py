"""Metrics on their way to the gateway."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.metrics import Family, MetricKind, Sample
from paceline.proto import fleet_pb2 as pb

_KINDS: dict[MetricKind, pb.MetricKind.ValueType] = {
    "counter": pb.METRIC_KIND_COUNTER,
    "gauge": pb.METRIC_KIND_GAUGE,
    "histogram": pb.METRIC_KIND_HISTOGRAM,
}
_NO_FAMILY = Family("", "", "gauge")


def metrics_to_pb(samples: Iterable[Sample]) -> list[pb.MetricFamily]:
    """Group samples by family, for the member that counted them."""
    families: dict[str, pb.MetricFamily] = {}
    for sample in samples:
        family = sample.family or _NO_FAMILY
        if family.name not in families:
            kind = _KINDS[family.kind]
            families[family.name] = pb.MetricFamily(
                name=family.name, help=family.help, kind=kind, has_role=family.has_role
            )
        suffix = "_total" if family.kind == "counter" else sample.suffix
        families[family.name].samples.add(figure=sample.figure, value=sample.value, labels=sample.labels, suffix=suffix)
    return list(families.values())
