"""Prometheus metrics of one model, with vLLM's names under the prefix `paceline:`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.block_counts import KV_USAGE
from paceline.core.request_classes import NO_CLASSES
from paceline.core.types import FinishReason
from paceline.proto import fleet_pb2
from paceline.proto.fleet_pb2 import MetricFamily, Sleep
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.queueing.fair_order import QueueClaim
from paceline.services.gateway.sequences.repetition import REPETITION
from paceline.services.gateway.sequences.runner import SequenceRunner
from paceline.services.gateway.sequences.traces import SequenceTrace
from paceline.services.gateway.telemetry.gateway_metrics import FIRST_TOKEN_BOUNDS, LATENCY_BOUNDS, TOKEN_BOUNDS
from paceline.services.gateway.telemetry.history import ConsoleHistory

_SHORT = tuple(sorted({0.001, 0.0025, 0.005, 0.02, 0.04, 0.06, 0.08, *TOKEN_BOUNDS}))
_FIRST = tuple(sorted({*_SHORT, *FIRST_TOKEN_BOUNDS}))
_LONG = tuple(sorted({0.01, 0.025, 0.05, 0.1, 0.25, *LATENCY_BOUNDS}))
_PLACING = (0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.005, 0.01, 0.05)
_KINDS = {
    fleet_pb2.METRIC_KIND_COUNTER: "counter",
    fleet_pb2.METRIC_KIND_GAUGE: "gauge",
    fleet_pb2.METRIC_KIND_HISTOGRAM: "histogram",
}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names for a model that is awake, and that sleeps at level 1 and 2."""
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """The metrics of one model at one gateway, in a registry of their own.

    Callers report events to counters and histograms. Gauges read the fleet and the runner given to `read_from`.

    Args:
        classes: names of the request classes.
    """

    def __init__(self, model: str, classes: Iterable[str] = NO_CLASSES) -> None:
        self.registry = CollectorRegistry()
        self.history = ConsoleHistory()
        """History of the last hour, for the console."""
        self._model = model

        def counter(name: str, help: str) -> Counter:
            return Counter(f"paceline:{name}", help, ["model_name"], registry=self.registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ["model_name"]
            return Histogram(f"paceline:{name}", help, labels, buckets=buckets, registry=self.registry).labels(model)

        def seconds(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return histogram(f"{name}_seconds", help, buckets)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"paceline:{name}", help, ["model_name"], registry=self.registry).labels(model)

        def gauges(name: str, help: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
            """Return the gauges of one metric by the value of their label."""
            made = Gauge(f"paceline:{name}", help, ["model_name", label], registry=self.registry)
            return {value: made.labels(model, value) for value in values}

        self._running = gauge("num_requests_running", "Sequences that are being generated")
        self._waiting = gauge("num_requests_waiting", "Sequences that wait for a worker")
        help = (
            "Waiting sequences. capacity: no worker has room. no_worker: no worker is ready. deferred: they wait "
            "for other sequences of their request"
        )
        self._by_reason = gauges(
            "num_requests_waiting_by_reason", help, "reason", ("capacity", "deferred", "no_worker")
        )
        help = "Sequences in the queue; urgent: their priority is below 0, late: it is above 0"
        self._by_priority = gauges("num_requests_waiting_by_priority", help, "priority", ("urgent", "usual", "late"))
        help = "Sequences in the queue, by their class"
        self._by_class = gauges("num_requests_waiting_by_class", help, "request_class", classes)
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache").labels(
            model
        )
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache").labels(model)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens").labels(model)
        self._generation_tokens = counter("generation_tokens", "Generated tokens").labels(model)
        help = "Attempts that went on at workers with other numerics than before, so that tokens may differ"
        self._numerics_changes = counter("request_numerics_changes", help).labels(model)
        self._success = Counter(
            "paceline:request_success", "Ended sequences", ["model_name", "finished_reason"], registry=self.registry
        )
        for reason in (*(reason.value for reason in FinishReason), REPETITION, "abort", "error"):
            self._success.labels(model, reason)  # creates the series, so that rates include the first request
        help = "Values and heartbeats in Redis that are not signed with the cluster's secret, or that are old"
        self.members_ignored = counter("members_ignored", help).labels(model)
        help = "Ended attempts that workers were asked for: finished, failed or cancelled"
        labels = ["model_name", "outcome"]
        self._attempts = Counter("paceline:request_attempts", help, labels, registry=self.registry)
        for own in ("finished", "failed", "cancelled"):
            self._attempts.labels(model, own)
        self._n = histogram("request_params_n", "Choices requested per prompt", _COUNTS)
        self._max_tokens = histogram("request_params_max_tokens", "Limit of tokens per choice, by prompt", _COUNTS)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a sequence", _COUNTS)
        self._request_generation = histogram("request_generation_tokens", "Generated tokens of a sequence", _COUNTS)
        help = "Times that a sequence lost its blocks and had to compute them again"
        self._preemptions = histogram("request_num_preemptions", help, _PREEMPTIONS)
        self._ttft = seconds("time_to_first_token", "From arrival to the first token", _FIRST)
        help = "Between two tokens. Tokens that come in one message share the time since the message before"
        self._itl = seconds("inter_token_latency", help, _SHORT)
        help = "From the first token to the last one, divided by the tokens after the first"
        self._per_token = seconds("request_time_per_output_token", help, _SHORT)
        self._e2e = seconds("e2e_request_latency", "From arrival to the end", _LONG)
        self._queue = seconds("request_queue_time", "From arrival to admission by a worker", _LONG)
        self._inference = seconds("request_inference_time", "From admission to the end", _LONG)
        self._prefill = seconds("request_prefill_time", "From admission to the first token", _LONG)
        self._decode = seconds("request_decode_time", "From the first token to the end", _LONG)
        help = "From the first token until the decode worker knows of the prompt's blocks"
        self._handoff_time = seconds("request_handoff_time", help, _SHORT)
        self._handoff = seconds("handoff", "From the prefill worker's token to the decode worker's first", _SHORT)
        help = "CPU time of a search for the workers of an attempt"
        self.search = seconds("placement_cpu", help, _PLACING)
        self._kv_usage: dict[str, float] = {}

    def read_from(self, workers: Callable[[], Iterable[RemoteWorker]], runner: SequenceRunner) -> None:
        """Set the sources of the gauges: the workers of the fleet, and a runner."""
        queue = runner.queue
        self._running.set_function(lambda: runner.running)
        self._waiting.set_function(lambda: runner.waiting)
        self._by_reason["capacity"].set_function(lambda: len(queue) - queue.deferred)
        self._by_reason["deferred"].set_function(lambda: queue.deferred)
        self._by_reason["no_worker"].set_function(lambda: len(runner.worker_wait))
        self._by_priority["urgent"].set_function(lambda: queue.count(lambda claim: claim.priority < 0))
        self._by_priority["usual"].set_function(lambda: queue.count(lambda claim: claim.priority == 0))
        self._by_priority["late"].set_function(lambda: queue.count(lambda claim: claim.priority > 0))
        for name, gauge in self._by_class.items():
            gauge.set_function(partial(queue.count, partial(_has_class, name)))
        self.registry.register(_FleetCollector(self._model, workers, self._kv_usage))

    def observe_params(self, plan: Plan) -> None:
        """Count the parameters of a request that is about to run."""
        for prompt in plan.prompts:
            self._n.observe(plan.n)
            self._max_tokens.observe(prompt.sampling.max_tokens)

    def observe(self, trace: SequenceTrace, generated_tokens: int, outcome: str, *, background: bool = False) -> None:
        """Count a sequence that has ended.

        Args:
            outcome: how the sequence ended: a finish reason, "abort" or "error".
            background: whether it is a background sequence. Its latencies do not count, because no client waits for it.
        """
        now = time.monotonic()
        self._success.labels(self._model, outcome).inc()
        for ended, number in trace.outcomes.items():
            self._attempts.labels(self._model, ended).inc(number)
        self._numerics_changes.inc(trace.numerics_changes)
        if trace.admitted is not None:
            self._request_prompt.observe(trace.prompt_tokens)
            self._request_generation.observe(generated_tokens)
            self._preemptions.observe(trace.preemptions)
            self._prompt_tokens.inc(trace.prompt_tokens)
            self._prefix_queries.inc(trace.prompt_tokens)
            self._prefix_hits.inc(trace.cached_tokens)
            self._generation_tokens.inc(generated_tokens)
        if not background:
            self._observe_times(trace, generated_tokens, now)
            self.history.observe(trace.arrived, trace.token_times, now, outcome == "error")

    def _observe_times(self, trace: SequenceTrace, generated_tokens: int, now: float) -> None:
        self._e2e.observe(now - trace.arrived)
        if trace.admitted is None:
            return
        self._queue.observe(trace.admitted - trace.arrived)
        self._inference.observe(now - trace.admitted)
        times = trace.token_times
        if not times:
            return
        self._ttft.observe(times[0] - trace.arrived)
        self._prefill.observe(times[0] - trace.admitted)
        self._decode.observe(now - times[0])
        if generated_tokens > 1:
            self._per_token.observe((times[-1] - times[0]) / (generated_tokens - 1))
        for gap in token_gaps(times, trace.token_counts, generated_tokens):
            self._itl.observe(gap)
        if trace.handed_over is not None and trace.attempts == 1:
            self._handoff_time.observe(trace.handed_over - times[0])
            if len(times) > 1:
                self._handoff.observe(times[1] - times[0])

    def set_kv_usage(self, kv_usage: Mapping[str, float]) -> None:
        """Set each host's present share of KV blocks in use, by host id. Values from heartbeats can be a second old."""
        self._kv_usage.clear()
        self._kv_usage.update(kv_usage)


def token_gaps(times: Sequence[float], counts: Sequence[int], tokens: int) -> Iterator[float]:
    """Yield the time between each token and the next one, in seconds.

    Args:
        times: instants at which messages with tokens came.
        counts: number of tokens in each message.
        tokens: number of tokens of the answer, without tokens that came after its end, such as after a stop string.
    """
    before, left = times[0], tokens - 1
    for number, (time_, count) in enumerate(zip(times, counts)):
        gaps = min(left, count - (number == 0))
        yield from itertools.repeat((time_ - before) / max(1, gaps), gaps)
        before, left = time_, left - gaps


def figures(families: Iterable[MetricFamily]) -> dict[str, float]:
    """Return the samples of a member's metrics that /fleet shows as figures, by the name of the figure."""
    return {sample.figure: sample.value for family in families for sample in family.samples if sample.figure}


class _FleetCollector(Collector):
    """Collector of the metrics that each member sent with its last heartbeat, labelled with the member's id and role.

    Args:
        kv_usage: shares of KV blocks in use, by host id, which are newer than the shares in heartbeats.
    """

    def __init__(
        self, model: str, workers: Callable[[], Iterable[RemoteWorker]], kv_usage: Mapping[str, float]
    ) -> None:
        self._model = model
        self._workers = workers
        self._kv_usage = kv_usage

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "worker", "role"]
        up = GaugeMetricFamily("paceline:worker_up", "Whether the worker gets new requests, or sleeps", labels=labels)
        running = GaugeMetricFamily("paceline:worker_requests_running", "Requests on the worker", labels=labels)
        waiting = GaugeMetricFamily("paceline:worker_requests_waiting", "Requests waiting in the worker", labels=labels)
        stats = GaugeMetricFamily("paceline:worker_stat", "All figures of a worker by name", labels=[*labels, "name"])
        families: dict[str, Metric] = {}
        for worker in self._workers():
            member = worker.member
            label = [self._model, member.worker_id, member.role]
            up.add_metric(label, float(worker.available and member.state in ("ready", "sleeping")))
            if member.role != "kvtransfer":
                running.add_metric(label, member.load.running)
                waiting.add_metric(label, member.load.waiting)
            for family in member.metrics:
                if family.kind != fleet_pb2.METRIC_KIND_HISTOGRAM:
                    for sample in family.samples:
                        if sample.figure:
                            stats.add_metric([*label, sample.figure], sample.value)
                if family.name:
                    self._add(families, family, dict(zip(labels, label)))
        yield from (up, running, waiting, stats, self._sleep_state(), *families.values())

    def _sleep_state(self) -> Metric:
        """Return the deepest sleep of the model's workers, with the labels of vLLM."""
        deepest = max((_depth(worker.member.sleep) for worker in self._workers()), default=0)
        labels = ["model_name", "sleep_state"]
        states = GaugeMetricFamily(
            "paceline:engine_sleep_state", "1 for the state of the model's workers", labels=labels
        )
        for depth, state in enumerate(_SLEEP_STATES):
            states.add_metric([self._model, state], float(depth == deepest))
        return states

    def _add(self, families: dict[str, Metric], family: MetricFamily, identity: dict[str, str]) -> None:
        name = f"paceline:{family.name}"
        if name not in families:
            families[name] = Metric(name, family.help, _KINDS.get(family.kind, "unknown"))
        if not family.has_role:
            del identity["role"]
        for sample in family.samples:
            value = sample.value
            if family.name == KV_USAGE.name:
                value = self._kv_usage.get(identity["worker"], value)
            families[name].add_sample(name + sample.suffix, identity | dict(sample.labels), value)


def _depth(sleep: Sleep) -> int:
    """Return the index of a worker's sleep in `_SLEEP_STATES`. If only its KV memory sleeps, this is level 1."""
    return max(sleep.weights, int(sleep.kv_cache))


def _has_class(name: str, claim: QueueClaim) -> bool:
    return claim.request_class == name
