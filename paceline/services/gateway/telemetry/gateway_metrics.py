"""The metrics of a gateway: its own metrics, and those of its models, which have the label `model_name`.

If the operator wants it, they also appear under the names and labels of vLLM's V1 engine, for dashboards and
autoscalers that were made for vLLM. There the gateway and all workers of a model are one engine: counts of workers are
summed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from paceline.core.kv_layout import BASE_TOKENS
from paceline.core.request_classes import NO_CLASSES
from paceline.services.common.process_samples import ProcessSamples
from paceline.services.gateway.http.errors import REASONS, Reason
from paceline.services.gateway.planning.media.metrics import MediaMetrics
from paceline.services.gateway.telemetry.used_names import UsedNames

_LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_LEFT_OUT = {"model_name", "worker", "role"}
"""Labels of our metrics that vLLM's metrics do not have."""


@dataclass(frozen=True, slots=True)
class _Name:
    """vLLM's name and our name for one metric, without the prefix and without the suffix `_total` of counters."""

    vllm: str
    ours: str = ""
    """Our name; "" if it is the same as vLLM's."""
    bounds: tuple[float, ...] = ()
    """vLLM's bucket bounds, for a histogram. Our histogram has these bounds and may have more."""


_NAMES = (
    _Name("num_requests_running"),
    _Name("num_requests_waiting"),
    _Name("num_requests_waiting_by_reason"),
    _Name("kv_cache_usage_perc"),
    _Name("prefix_cache_queries"),
    _Name("prefix_cache_hits"),
    _Name("num_preemptions"),
    _Name("prompt_tokens"),
    _Name("prompt_tokens_cached", "prefix_cache_hits"),
    _Name("generation_tokens"),
    _Name("request_success"),
    _Name("iteration_tokens_total", "iteration_tokens", (1, *(8 * 2**power for power in range(12)))),
    _Name("request_prompt_tokens", bounds=_COUNTS),
    _Name("request_generation_tokens", bounds=_COUNTS),
    _Name("request_max_num_generation_tokens", "request_params_max_tokens", _COUNTS),
    _Name("request_num_preemptions", bounds=(1, 2, 3, 4, 5, 10, 20)),
    _Name("request_params_n", bounds=(1, 2, 5, 10, 20)),
    _Name("request_params_max_tokens", bounds=_COUNTS),
    _Name("time_to_first_token_seconds", bounds=_FIRST_TOKEN),
    _Name("inter_token_latency_seconds", bounds=_PER_TOKEN),
    _Name("request_time_per_output_token_seconds", bounds=_PER_TOKEN),
    _Name("e2e_request_latency_seconds", bounds=_LATENCIES),
    _Name("request_queue_time_seconds", bounds=_LATENCIES),
    _Name("request_inference_time_seconds", bounds=_LATENCIES),
    _Name("request_prefill_time_seconds", bounds=_LATENCIES),
    _Name("request_decode_time_seconds", bounds=_LATENCIES),
    _Name("engine_sleep_state"),
    _Name("spec_decode_num_drafts"),
    _Name("spec_decode_num_draft_tokens"),
    _Name("spec_decode_num_accepted_tokens"),
    _Name("spec_decode_num_accepted_tokens_per_pos"),
)

NamesOfAdapters = Callable[[], UsedNames]
"""A function that returns the adapters of one model that sequences use now."""

LATENCY_BOUNDS, FIRST_TOKEN_BOUNDS, TOKEN_BOUNDS = _LATENCIES, _FIRST_TOKEN, _PER_TOKEN


class VllmModelNames(Collector):
    """Collector of a model's metrics that vLLM has, too, under vLLM's names.

    Args:
        registry: registry with the model's own metrics.
        engine: number of the model at this gateway, from 0, for vLLM's label `engine`.
    """

    def __init__(self, model: str, registry: CollectorRegistry, engine: int) -> None:
        self._engine = {"model_name": model, "engine": str(engine)}
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        ours = {metric.name.removeprefix("paceline:"): metric for metric in self._registry.collect()}
        for name in _NAMES:
            if (metric := ours.get(name.ours or name.vllm)) is not None:
                yield self._renamed(metric, name)
        if (stats := ours.get("worker_stat")) is not None:
            yield self._cache_config(stats)

    def _renamed(self, metric: Metric, name: _Name) -> Metric:
        renamed = Metric(f"vllm:{name.vllm}", metric.documentation, metric.type)
        bounds = {*map(float, name.bounds), float("inf")}
        values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = defaultdict(list)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            if suffix == "_created" or (suffix == "_bucket" and float(sample.labels["le"]) not in bounds):
                continue
            values[suffix, _further_labels(sample)].append(sample.value)
        # The fullest memory says when there is no room. The sum would be more than 1.
        combine = max if name.vllm == "kv_cache_usage_perc" else sum
        for (suffix, labels), all_values in values.items():
            renamed.add_sample(renamed.name + suffix, self._engine | dict(labels), combine(all_values))
        return renamed

    def _cache_config(self, stats: Metric) -> Metric:
        blocks = sum(sample.value for sample in stats.samples if sample.labels["name"] == "blocks_total")
        info = Metric("vllm:cache_config_info", "Size of the KV memory of all hosts", "gauge")
        labels = {"block_size": str(BASE_TOKENS), "num_gpu_blocks": f"{blocks:.0f}", "enable_prefix_caching": "True"}
        info.add_sample(info.name, {"engine": self._engine["engine"], **labels}, 1.0)
        return info


class VllmServerNames(Collector):
    """Collector of the server's metrics that vLLM has, too, and that have no model, under vLLM's names.

    Args:
        adapters: functions that return the adapters of each model in use. More may be added later.
    """

    def __init__(self, registry: CollectorRegistry, adapters: Sequence[NamesOfAdapters]) -> None:
        self._registry = registry
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        yield self._loras()
        for metric in self._registry.collect():
            if metric.name == "paceline:http_responses":
                yield _http_requests(metric)
            elif metric.name == "paceline:requests_refused":
                yield _rejections(metric)

    def _loras(self) -> Metric:
        """Return the names of adapters in use as labels. The value is the time, so that readers find the newest."""
        used = [names() for names in self._adapters]
        loras = Metric("vllm:lora_requests_info", "Adapters that sequences use; the value is the time", "gauge")
        labels = {
            "max_lora": str(max((each.slots for each in used), default=0)),
            "running_lora_adapters": ",".join(name for each in used for name in each.running),
            "waiting_lora_adapters": ",".join(name for each in used for name in each.waiting),
        }
        loras.add_sample(loras.name, labels, time.time())
        return loras


def _further_labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    labels: Mapping[str, str] = sample.labels
    return tuple((name, value) for name, value in labels.items() if name not in _LEFT_OUT)


def _http_requests(responses: Metric) -> Metric:
    """Return the counts of responses by the class of their status, such as 2xx, as vLLM's HTTP server has them."""
    counted: dict[tuple[str, str, str], float] = defaultdict(float)
    for sample in responses.samples:
        if sample.name.endswith("_total"):
            labels = sample.labels
            counted[labels["handler"], labels["method"], f"{labels['status'][0]}xx"] += sample.value
    metric = Metric("http_requests", "Responses by class of their status", "counter")
    for (handler, method, status), value in counted.items():
        metric.add_sample("http_requests_total", {"handler": handler, "method": method, "status": status}, value)
    return metric


def _rejections(refused: Metric) -> Metric:
    """Return the counts of refused requests by model and reason, summed over request classes."""
    counted: dict[tuple[str, str], float] = defaultdict(float)
    for sample in refused.samples:
        if sample.name.endswith("_total"):
            counted[sample.labels["model_name"], sample.labels["reason"]] += sample.value
    metric = Metric("vllm:admission_rejections", refused.documentation, "counter")
    for (model, reason), value in counted.items():
        metric.add_sample(f"{metric.name}_total", {"model_name": model, "reason": reason}, value)
    return metric


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
        self._adapters: list[NamesOfAdapters] = []
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
        self._vllm: list[Collector] | None = [VllmServerNames(self.registry, self._adapters)] if vllm_names else None

    def add(self, model: str, registry: CollectorRegistry, adapters: NamesOfAdapters) -> None:
        """Add a model, whose metrics `render` then includes.

        Args:
            adapters: function that returns the model's adapters in use.
        """
        self._registries.append(registry)
        self._adapters.append(adapters)
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
