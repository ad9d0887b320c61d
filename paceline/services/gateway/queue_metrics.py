"""Metrics of who waits in the queue of a model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from paceline.services.gateway.admission_queue import AdmissionQueue
from paceline.services.gateway.queueing.claim import Claim


def add_queue_metrics(registry: CollectorRegistry, model: str, queue: AdmissionQueue, classes: Iterable[str]) -> None:
    """Add the metrics of one queue to a registry.

    Args:
        classes: names of the classes of requests.
    """

    def gauge(name: str, help: str, label: str) -> Gauge:
        return Gauge(f"paceline:{name}", help, ["model_name", label], registry=registry)

    help = "Sequences in the queue; urgent: their priority is below 0, late: it is above 0"
    by_priority = gauge("num_requests_waiting_by_priority", help, "priority")
    by_priority.labels(model, "urgent").set_function(lambda: queue.count(lambda claim: claim.priority < 0))
    by_priority.labels(model, "usual").set_function(lambda: queue.count(lambda claim: claim.priority == 0))
    by_priority.labels(model, "late").set_function(lambda: queue.count(lambda claim: claim.priority > 0))
    by_class = gauge("num_requests_waiting_by_class", "Sequences in the queue, by their class", "request_class")
    for name in classes:
        by_class.labels(model, name).set_function(partial(queue.count, partial(_has_class, name)))


def _has_class(name: str, claim: Claim) -> bool:
    return claim.request_class == name
