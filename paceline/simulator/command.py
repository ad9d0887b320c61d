"""`paceline simulate`: from options to simulations, and their answers in words, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits, class_latencies
from paceline.core.request_classes import DEFAULT, read_classes
from paceline.core.step_times import read_profile
from paceline.simulator.adapters import AdapterOptions
from paceline.simulator.answers import on_caches, on_disaggregation, on_failure
from paceline.simulator.described_load import read_load
from paceline.simulator.gateway import GatewayOptions
from paceline.simulator.report import render
from paceline.simulator.report.content import SimulationReport
from paceline.simulator.report.describe import describe
from paceline.simulator.scenario import PlannedFailure, Scenario
from paceline.simulator.search import Found, MissedError, cheapest
from paceline.simulator.simulation import simulate
from paceline.simulator.text import lines
from paceline.simulator.trace import LoadTrace, TraceRequest
from paceline.simulator.trace_files import read_trace


def simulate_fleet(arguments: dict[str, Any]) -> int:
    """Run `paceline simulate` with these options. Return 0 if the objectives are met, else 1.

    Raises ConfigError.
    """
    load = _Load.read(arguments)
    scenario = _scenario(arguments)
    found = _find(scenario, load, arguments["find"])
    others: list[Found] = []
    notes = [on_failure(each, found.result, arguments["share"]) for each in scenario.failures]
    for tokens in arguments["cache_tokens"][1:]:
        try:
            others.append(_find(dataclasses.replace(scenario, host_tokens=tokens), load, arguments["find"]))
        except MissedError:
            notes.append(f"With {tokens:,} tokens of cache on each host, no number of workers meets the objectives.")
    if others:
        notes.append(on_caches([found, *others]))
    if _is_compared(arguments, found.scenario):
        try:
            together = _find(found.scenario.together(), load, arguments["find"])
        except MissedError:
            notes.append("Disaggregation pays for this load: workers that do both miss the objectives, however many.")
        else:
            others.append(together)
            notes.append(on_disaggregation(found, together))
    for fleet in (found, *others):
        print(*lines(fleet), sep="\n")
        print()
    print(*notes, sep="\n", end="\n" if notes else "")
    _write(arguments, load.name, [found, *others], notes)
    return 0 if found.result.is_met else 1


def _is_compared(arguments: dict[str, Any], scenario: Scenario) -> bool:
    """Return whether a fleet is compared with an aggregated one."""
    is_asked = not (arguments["no_compare"] or arguments["planner"])
    return is_asked and not scenario.is_aggregated and scenario.prefill > 0


@dataclass(frozen=True, slots=True)
class _Load:
    """A load, which can be read again for each simulation."""

    name: str
    trace: LoadTrace
    speed: float
    most: int

    @staticmethod
    def read(arguments: dict[str, Any]) -> _Load:
        file, described = arguments["trace"], arguments["load"]
        if (file is None) == (described is None):
            raise ConfigError("simulate needs one load: --trace FILE, or --load FILE")
        if not arguments["speed"] > 0:
            raise ConfigError("--speed must be above 0")
        if arguments["requests"] < 0:
            raise ConfigError("--requests must be at least 0, which takes all")
        trace = read_trace(file) if described is None else read_load(described).trace()
        if next(iter(trace), None) is None:
            raise ConfigError(f"{described} describes no request: raise its seconds, its rate or its max_model_len")
        return _Load((file or described).name, trace, arguments["speed"], arguments["requests"])

    def requests(self) -> LoadTrace:
        return LoadTrace(self.trace.block_tokens, self._faster())

    def _faster(self) -> Iterator[TraceRequest]:
        for request in itertools.islice(self.trace, self.most or None):
            yield request._replace(arrival=request.arrival / self.speed)


def _scenario(arguments: dict[str, Any]) -> Scenario:
    if arguments["budget"] and not arguments["planner"]:
        raise ConfigError("--budget is for the planner; add --planner, or leave it out")
    if arguments["find"] and arguments["planner"]:
        raise ConfigError("--find searches a fleet that stays as it is; leave out --find or --planner")
    limits = RoleLimits(0, 1_000_000)
    classes = read_classes(str(arguments["classes_file"] or ""))
    latencies = class_latencies(classes, arguments["share"])
    objectives = Objectives(
        classes=latencies,
        default=latencies.get(DEFAULT, Latency(arguments["ttft"], arguments["itl"], arguments["share"])),
        roles={"prefill": limits, "decode": dataclasses.replace(limits, least=1)},
        budget=arguments["budget"] or None,
    )
    if min(arguments["cache_tokens"]) < 0:
        raise ConfigError("--cache-tokens must be at least 0, which takes the profile's")
    if arguments["no_restart"] and not arguments["fail"]:
        raise ConfigError("--no-restart is for workers that fail; add --fail SHARE@SECONDS, or leave it out")
    profile, per_host = read_profile(arguments["profile"]), arguments["per_host"]
    if per_host is not None and profile.turns is not None:
        raise ConfigError(
            "--per-host is for workers with a device or cores of their own. Those of this profile share the cores of "
            "their host, so each host has one of each role; leave it out"
        )
    scenario = Scenario(
        profile=profile,
        prefill=arguments["prefill"],
        decode=arguments["decode"],
        objectives=objectives,
        is_aggregated=arguments["aggregated"],
        workers_per_host=8 if per_host is None else per_host,
        cache_policy=arguments["cache_policy"],
        host_tokens=arguments["cache_tokens"][0],
        gateway=GatewayOptions(
            queue_seconds=arguments["queue_seconds"],
            max_waiting=arguments["max_waiting"],
            classes=classes,
            retries=arguments["retries"],
        ),
        adapters=AdapterOptions(arguments["max_cpu_loras"], arguments["adapter_seconds"]),
        failures=tuple(map(PlannedFailure.parse, arguments["fail"])),
        restarts=not arguments["no_restart"],
        plans=arguments["planner"],
        seed=arguments["seed"],
    )
    scenario.check()
    return scenario


def _find(scenario: Scenario, load: _Load, searches: bool) -> Found:
    if scenario.is_aggregated:  # all workers are alike, so one number is searched
        scenario = dataclasses.replace(scenario, prefill=0, decode=scenario.prefill + scenario.decode)
    if searches:
        return cheapest(scenario, lambda candidate: simulate(candidate, load.requests()))
    return Found(scenario, simulate(scenario, load.requests()))


def _write(arguments: dict[str, Any], load: str, found: list[Found], notes: list[str]) -> None:
    shown = SimulationReport(
        simulations=tuple(describe(fleet.scenario.name, load, fleet.scenario, fleet.result) for fleet in found),
        notes=tuple(notes),
    )
    for file, text in ((arguments["json"], shown.to_json), (arguments["html"], lambda: render(shown))):
        if file is not None:
            try:
                file.write_text(text(), "utf-8")
            except OSError as error:
                raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
