"""Prometheus metrics, by the names that vLLM gave them, under `paceline:`."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.types import FinishReason
from paceline.services.gateway.fleet_worker import Worker
from paceline.services.gateway.plan import Plan
from paceline.services.gateway.record import RequestRecord
from paceline.services.gateway.request import RequestRunner

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_REQUEST_TIMES = {
    f"{phase}_{kind}_seconds": (phase, kind) for phase in ("prefill", "decode") for kind in ("model", "other")
}
# Of `engine.TIMES`, which a gateway cannot import.
_STEP_TIMES = ("busy", "bubble", "yielded", "plan", "output")
_WITHIN = re.compile(r"swap_ins_within_(\d+)ms")
_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self, model: str, workers: Callable[[], Iterable[Worker]], runner: RequestRunner) -> None:
        self.registry = CollectorRegistry()
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

        running = gauge("num_requests_running", "Sequences that are being generated")
        running.set_function(lambda: runner.active - len(runner.line))
        gauge("num_requests_waiting", "Sequences that wait for a worker").set_function(lambda: len(runner.line))
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache").labels(
            model
        )
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache").labels(model)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens").labels(model)
        self._generation_tokens = counter("generation_tokens", "Generated tokens").labels(model)
        self._attempts = counter("request_attempts", "Attempts that workers admitted").labels(model)
        self._success = Counter(
            "paceline:request_success", "Ended sequences", ["model_name", "finished_reason"], registry=self.registry
        )
        for reason in (*(reason.value for reason in FinishReason), "abort", "error"):
            self._success.labels(model, reason)  # so that a rate can be taken from the first request on
        self._n = histogram("request_params_n", "Answers asked for, by prompt", _COUNTS)
        self._max_tokens = histogram("request_params_max_tokens", "Most tokens of an answer, by prompt", _COUNTS)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a sequence", _COUNTS)
        self._request_generation = histogram("request_generation_tokens", "Generated tokens of a sequence", _COUNTS)
        self._ttft = seconds("time_to_first_token", "From arrival to the first token", (*_SHORT, 20, 40, 80, 160))
        self._itl = seconds("inter_token_latency", "Between messages with tokens", _SHORT)
        self._e2e = seconds("e2e_request_latency", "From arrival to the end", _LONG)
        self._queue = seconds("request_queue_time", "From arrival to admission by a worker", _LONG)
        self._inference = seconds("request_inference_time", "From admission to the end", _LONG)
        self._prefill = seconds("request_prefill_time", "From admission to the first token", _LONG)
        self._decode = seconds("request_decode_time", "From the first token to the end", _LONG)
        help = "From the first token until the decode worker knows of the prompt's blocks"
        self._handoff_time = seconds("request_handoff_time", help, _SHORT)
        self._handoff = seconds("handoff", "From the prefill worker's token to the decode worker's first", _SHORT)
        self.registry.register(_FleetCollector(model, workers))

    def observe_params(self, plan: Plan) -> None:
        """Counts what a request that is to be served asks for."""
        for prompt in plan.prompts:
            self._n.observe(plan.n)
            self._max_tokens.observe(prompt.sampling.max_tokens)

    def observe(self, record: RequestRecord, generated_tokens: int, outcome: str) -> None:
        """Counts a sequence that has ended. `outcome` is its finish reason, "abort" or "error"."""
        now = time.monotonic()
        self._success.labels(self._model, outcome).inc()
        self._attempts.inc(record.attempts)
        self._e2e.observe(now - record.arrived)
        if record.admitted is None:
            return
        self._queue.observe(record.admitted - record.arrived)
        self._inference.observe(now - record.admitted)
        self._request_prompt.observe(record.prompt_tokens)
        self._request_generation.observe(generated_tokens)
        self._prompt_tokens.inc(record.prompt_tokens)
        self._prefix_queries.inc(record.prompt_tokens)
        self._prefix_hits.inc(record.cached_tokens)
        self._generation_tokens.inc(generated_tokens)
        times = record.token_times
        if not times:
            return
        self._ttft.observe(times[0] - record.arrived)
        self._prefill.observe(times[0] - record.admitted)
        self._decode.observe(now - times[0])
        for earlier, later in itertools.pairwise(times):
            self._itl.observe(later - earlier)
        if record.handed_over is not None and record.attempts == 1:
            self._handoff_time.observe(record.handed_over - times[0])
            if len(times) > 1:
                self._handoff.observe(times[1] - times[0])

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    """What the workers report of themselves, as of their last heartbeat."""

    def __init__(self, model: str, workers: Callable[[], Iterable[Worker]]) -> None:
        self._model = model
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "worker", "role"]
        up = GaugeMetricFamily("paceline:worker_up", "Whether the worker gets new requests", labels=labels)
        running = GaugeMetricFamily("paceline:worker_requests_running", "Requests on the worker", labels=labels)
        waiting = GaugeMetricFamily("paceline:worker_requests_waiting", "Requests waiting in the worker", labels=labels)
        usage = GaugeMetricFamily("paceline:kv_cache_usage_perc", "KV blocks in use, of 1", labels=labels)
        preemptions = CounterMetricFamily("paceline:num_preemptions", "Requests that had to start again", labels=labels)
        speculation = {
            name: CounterMetricFamily(f"paceline:spec_decode_num_{name}", help, labels=labels)
            for name, help in (
                ("drafts", "Times that drafts of a request were verified"),
                ("draft_tokens", "Draft tokens that were verified"),
                ("accepted_tokens", "Draft tokens that came true"),
            )
        }
        by_position = CounterMetricFamily(
            "paceline:spec_decode_num_accepted_tokens_per_pos", "By place in the draft", labels=[*labels, "position"]
        )
        stats = GaugeMetricFamily("paceline:worker_stat", "Whatever else a worker reports", labels=[*labels, "name"])
        for worker in self._workers():
            member = worker.member
            label = [self._model, member.worker_id, member.role]
            up.add_metric(label, float(worker.available and member.state == "ready"))
            for name, value in member.stats.items():
                if not name.startswith("swap_in"):  # which is a histogram of its own
                    stats.add_metric([*label, name], value)
            if total := member.stats.get("blocks_total", 0):
                used = member.stats.get("blocks_held", 0) + member.stats.get("blocks_in_flight", 0)
                usage.add_metric(label, used / total)
            if member.role == "kvtransfer":
                continue
            running.add_metric(label, member.running)
            waiting.add_metric(label, member.waiting)
            preemptions.add_metric(label, member.stats.get("preemptions", 0))
            for name, family in speculation.items():
                family.add_metric(label, member.stats.get(name, 0))
            for name, value in member.stats.items():
                if name.startswith("accepted_at_"):
                    by_position.add_metric([*label, name.removeprefix("accepted_at_")], value)
        yield from (up, running, waiting, usage, preemptions, *speculation.values(), by_position, stats)
        yield from self._step_times(labels)
        yield from self._transfers()
        yield from self._swaps(labels)

    def _swaps(self, labels: list[str]) -> Iterator[Metric]:
        """Between workers' own pools and the arena."""
        moved = CounterMetricFamily(
            "paceline:kv_offload_bytes",
            "Bytes of KV blocks copied from a worker's pool to the arena (store), back (load), and from the pool of "
            "another worker on its device (device)",
            labels=[*labels, "direction"],
        )
        parkings = CounterMetricFamily(
            "paceline:num_parkings", "Requests that left a worker's pool to come back later", labels=labels
        )
        loads = HistogramMetricFamily(
            "paceline:kv_swap_in_seconds", "Until the blocks of a request were in a worker's pool", labels=labels
        )
        for member in (worker.member for worker in self._workers() if worker.member.role != "kvtransfer"):
            label, stats = [self._model, member.worker_id, member.role], member.stats
            for direction, name in (("load", "loaded_bytes"), ("device", "device_bytes"), ("store", "stored_bytes")):
                moved.add_metric([*label, direction], stats.get(name, 0))
            parkings.add_metric(label, stats.get("parkings", 0))
            within = {int(found[1]): count for name, count in stats.items() if (found := _WITHIN.fullmatch(name))}
            buckets = [(str(bound / 1000), within[bound]) for bound in sorted(within)]
            buckets.append(("+Inf", stats.get("swap_ins", 0)))
            loads.add_metric(label, buckets, stats.get("swap_in_seconds", 0))
        yield from (moved, parkings, loads)

    def _transfers(self) -> Iterator[Metric]:
        labels = ["model_name", "worker"]
        count = CounterMetricFamily(
            "paceline:kv_transfers", "Prompts whose KV blocks came from another host", labels=[*labels, "path"]
        )
        sums = {
            f"transfer_{name}": CounterMetricFamily(f"paceline:kv_transfer_{name}", help, labels=labels)
            for name, help in (
                ("failures", "Transfers between hosts that failed"),
                ("bytes", "Bytes of KV blocks that came from other hosts"),
                ("read_seconds", "Time in which blocks were read from other hosts"),
            )
        }
        for member in (worker.member for worker in self._workers() if worker.member.role == "kvtransfer"):
            for name, value in member.stats.items():
                label = [self._model, member.worker_id]
                if name in sums:
                    sums[name].add_metric(label, value)
                elif name.startswith("transfers_"):
                    count.add_metric([*label, name.removeprefix("transfers_")], value)
        yield from (count, *sums.values())

    def _step_times(self, labels: list[str]) -> Iterator[Metric]:
        times = CounterMetricFamily(
            "paceline:worker_step_seconds",
            "busy: computing; bubble: idle although there was work; yielded: idle while others had their turn; "
            "plan and output: of the host thread, beside it",
            labels=[*labels, "kind"],
        )
        request_times = CounterMetricFamily(
            "paceline:worker_request_step_seconds",
            "Time of steps, counted for each request in them; model: forward pass and logits; other: the rest",
            labels=[*labels, "phase", "kind"],
        )
        for member in (worker.member for worker in self._workers() if worker.member.role != "kvtransfer"):
            label = [self._model, member.worker_id, member.role]
            for name, value in member.stats.items():
                if name in _REQUEST_TIMES:
                    request_times.add_metric([*label, *_REQUEST_TIMES[name]], value)
                elif name.removesuffix("_seconds") in _STEP_TIMES:
                    times.add_metric([*label, name.removesuffix("_seconds")], value)
        yield from (times, request_times)
