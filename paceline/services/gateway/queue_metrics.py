"""Metrics of the queue: who waits, and who was refused for which reason."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from paceline.services.gateway.admission_queue import AdmissionQueue
from paceline.services.gateway.queueing.claim import Claim
from paceline.services.gateway.queueing.shedding import REASONS, Reason


class QueueMetrics:
    """The metrics of one queue.

    Args:
        classes: names of the classes of requests.
    """

    def __init__(self, registry: CollectorRegistry, model: str, queue: AdmissionQueue, classes: Iterable[str]) -> None:
        self._model = model

        def gauge(name: str, help: str, label: str) -> Gauge:
            return Gauge(f"paceline:{name}", help, ["model_name", label], registry=registry)

        help = "Sequences in the queue; urgent: their priority is below 0, late: it is above 0"
        by_priority = gauge("num_requests_waiting_by_priority", help, "priority")
        by_priority.labels(model, "urgent").set_function(lambda: queue.count(lambda claim: claim.priority < 0))
        by_priority.labels(model, "usual").set_function(lambda: queue.count(lambda claim: claim.priority == 0))
        by_priority.labels(model, "late").set_function(lambda: queue.count(lambda claim: claim.priority > 0))
        help = (
            "Refused requests. limit: a limit of their key. overload: the objective of their class would be missed. "
            "queue_full: --max-waiting others wait. timeout: --queue-seconds. deadline: their client's own. priority: "
            "more urgent ones came. background: no worker was idle for a line of a batch"
        )
        labels = ["model_name", "request_class", "reason"]
        self._refused = Counter("paceline:requests_refused", help, labels, registry=registry)
        by_class = gauge("num_requests_waiting_by_class", "Sequences in the queue, by their class", "request_class")
        for name in classes:
            by_class.labels(model, name).set_function(partial(queue.count, partial(_has_class, name)))
            for reason in REASONS:
                self._refused.labels(model, name, reason)  # creates the series, so that rates include the first one

    def count_refusal(self, request_class: str, reason: Reason) -> None:
        """Count a request that is refused."""
        self._refused.labels(self._model, request_class, reason).inc()


def _has_class(name: str, claim: Claim) -> bool:
    return claim.request_class == name
