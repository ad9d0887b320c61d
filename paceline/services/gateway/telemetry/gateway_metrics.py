"""The metrics of a gateway: its own metrics, and those of its models, which have the label `model_name`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline.core.request_classes import NO_CLASSES
from paceline.services.common.process_samples import ProcessSamples
from paceline.services.gateway.http.errors import REASONS, Reason
from paceline.services.gateway.planning.media.metrics import MediaMetrics
from paceline.services.gateway.telemetry.vllm_metrics import VllmModelNames, VllmServerNames


class GatewayMetrics:
    """The metrics that do not belong to one model, and the output of all metrics.

    Args:
        classes: names of the request classes.
        vllm_names: whether `render` also writes metrics that vLLM has under vLLM's names.
    """

    def __init__(self, classes: Iterable[str] = NO_CLASSES, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        """Registry of the metrics that do not belong to one model."""
        self._registries = [self.registry]
        self._classes = tuple(classes)
        labels = ["handler", "method", "status"]
        help = "HTTP responses by route and status"
        self._responses = Counter("paceline:http_responses", help, labels, registry=self.registry)
        help = (
            "Refused requests. limit: a limit of their key. overload: the objective of their class would be missed. "
            "queue_full: --max-waiting others wait. timeout: --queue-seconds. deadline: their client's own. priority: "
            "more urgent ones came. background: no worker was idle for a line of a batch"
        )
        labels = ["model_name", "request_class", "reason"]
        self._refused = Counter("paceline:requests_refused", help, labels, registry=self.registry)
        self.media = MediaMetrics(self.registry)
        self.registry.register(_OwnProcess())
        self._vllm: list[Collector] | None = [VllmServerNames(self.registry)] if vllm_names else None

    def add(self, model: str, registry: CollectorRegistry) -> None:
        """Add the registry of a model, whose metrics `render` then includes."""
        self._registries.append(registry)
        for name in self._classes:
            for reason in REASONS:
                self._refused.labels(model, name, reason)  # creates the series, so that rates include the first one
        if self._vllm is not None:
            self._vllm.append(VllmModelNames(model, registry, engine=len(self._registries) - 2))

    def count_response(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP response.

        Args:
            handler: pattern of the route.
        """
        self._responses.labels(handler, method, str(status)).inc()

    def count_refusal(self, model: str, request_class: str, reason: Reason) -> None:
        """Count a refused request.

        Args:
            model: name of the model; "" if unknown.
        """
        self._refused.labels(model, request_class, reason).inc()

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return _render(self._registries) + _render(self._vllm or ())


class _OwnProcess(Collector):
    """Collector of the figures of the gateway's own process. The figures of other processes come with heartbeats."""

    def __init__(self) -> None:
        self._samples = ProcessSamples()

    def collect(self) -> Iterator[Metric]:
        for sample in self._samples:
            assert sample.family is not None
            metric = Metric(f"paceline:{sample.family.name}", sample.family.help, sample.family.kind)
            metric.add_sample(metric.name, {"role": "gateway"}, sample.value)
            yield metric


def _render(sources: Iterable[Collector | CollectorRegistry]) -> bytes:
    joined = CollectorRegistry()
    joined.register(_Joined(sources))
    return generate_latest(joined)


class _Joined(Collector):
    """Collector that joins several sources. A metric that several sources have appears once, with all their samples."""

    def __init__(self, sources: Iterable[Collector | CollectorRegistry]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for source in self._sources:
            for metric in source.collect():
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples.extend(metric.samples)
        yield from families.values()
