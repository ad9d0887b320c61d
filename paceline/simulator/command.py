"""`paceline simulate`: the answer in words, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.step_times import read_profile
from paceline.simulator.described_load import read_load
from paceline.simulator.gateway import GatewayOptions
from paceline.simulator.report import render
from paceline.simulator.report.content import Report
from paceline.simulator.report.describe import describe
from paceline.simulator.result import ClassResult
from paceline.simulator.scenario import Failure, Scenario
from paceline.simulator.search import Found, MissedError, cheapest
from paceline.simulator.simulation import simulate
from paceline.simulator.trace import Trace, TraceRequest
from paceline.simulator.trace_files import read_trace

PAYS = 0.02
"""Share by which one kind of fleet must be better than the other before this is called a difference."""


def simulate_fleet(arguments: dict[str, Any]) -> int:
    """Run the command. Return 0 if the objectives are met, else 1.

    Raises ConfigError.
    """
    load = _Load.read(arguments)
    scenario = _scenario(arguments)
    found = _find(scenario, load, arguments["find"])
    alternatives: list[Found] = []
    notes: list[str] = []
    if not (arguments["no_compare"] or arguments["planner"] or found.scenario.is_aggregated or not scenario.prefill):
        try:
            other = _find(dataclasses.replace(found.scenario, is_aggregated=True), load, arguments["find"])
        except MissedError:
            notes.append("Disaggregation pays for this load: workers that do both miss the objectives, however many.")
        else:
            alternatives.append(other)
            notes.extend(compare(found, other))
    for own in (found, *alternatives):
        print(*lines(own), sep="\n")
        print()
    print(*notes, sep="\n", end="\n" if notes else "")
    _write(arguments, load.name, [found, *alternatives], notes)
    return 0 if found.result.is_met else 1


@dataclass(frozen=True, slots=True)
class _Load:
    """A load, which can be read again for each simulation."""

    name: str
    trace: Trace
    speed: float
    most: int

    @staticmethod
    def read(arguments: dict[str, Any]) -> _Load:
        file, described = arguments["trace"], arguments["load"]
        if (file is None) == (described is None):
            raise ConfigError("simulate needs a load: --trace FILE, or --load FILE")
        if not arguments["speed"] > 0:
            raise ConfigError("--speed must be above 0")
        if arguments["requests"] < 0:
            raise ConfigError("--requests must be at least 0, which takes all")
        trace = read_trace(file) if described is None else read_load(described).trace()
        if next(iter(trace), None) is None:
            raise ConfigError(f"{described} describes no request: raise its seconds or its rate")
        return _Load((file or described).name, trace, arguments["speed"], arguments["requests"])

    def requests(self) -> Trace:
        return Trace(self.trace.block_tokens, self._faster())

    def _faster(self) -> Iterator[TraceRequest]:
        for request in itertools.islice(self.trace, self.most or None):
            yield request._replace(arrival=request.arrival / self.speed)


def _scenario(arguments: dict[str, Any]) -> Scenario:
    if arguments["budget"] and not arguments["planner"]:
        raise ConfigError("--budget is for the planner; add --planner, or leave it out")
    if arguments["find"] and arguments["planner"]:
        raise ConfigError("--find searches a fleet that stays as it is; leave out --find or --planner")
    limits = RoleLimits(0, 1_000_000)
    objectives = Objectives(
        default=Latency(arguments["ttft"], arguments["itl"], arguments["share"]),
        roles={"prefill": limits, "decode": dataclasses.replace(limits, least=1)},
        budget=arguments["budget"] or None,
    )
    scenario = Scenario(
        profile=read_profile(arguments["profile"]),
        prefill=arguments["prefill"],
        decode=arguments["decode"],
        objectives=objectives,
        is_aggregated=arguments["aggregated"],
        workers_per_host=arguments["per_host"],
        cache_policy=arguments["cache_policy"],
        host_tokens=arguments["cache_tokens"],
        gateway=GatewayOptions(queue_seconds=arguments["queue_seconds"]),
        failures=tuple(map(Failure.parse, arguments["fail"])),
        plans=arguments["planner"],
        seed=arguments["seed"],
    )
    scenario.check()
    return scenario


def _find(scenario: Scenario, load: _Load, searches: bool) -> Found:
    if scenario.is_aggregated:  # all workers are alike, so one number is searched
        scenario = dataclasses.replace(scenario, prefill=0, decode=scenario.prefill + scenario.decode)
    if searches:
        return cheapest(scenario, lambda own: simulate(own, load.requests()))
    return Found(scenario, simulate(scenario, load.requests()))


def lines(found: Found) -> Iterator[str]:
    """Yield the result in lines of text."""
    scenario, result = found.scenario, found.result
    devices = result.device_seconds / result.seconds if result.seconds else 0.0
    yield scenario.name
    yield (
        f"  {result.seconds:.0f} s simulated, {devices:.1f} devices on average, cost {result.cost:.3g} "
        f"({result.cost / max(1e-9, result.seconds) * 3600:.2f} an hour)"
    )
    for name, own in sorted(result.classes.items()):
        yield from _class_lines(name, own, scenario.objectives.latency(name))
    busy = ", ".join(f"{role} workers compute {share:.0%} of the time" for role, share in result.busy.items() if share)
    yield f"  {busy or 'no worker computed'}; {result.preemptions} preemptions"
    for decision in result.decisions:
        yield f"  {decision.at:7.0f} s  {decision.line}"


def _class_lines(name: str, own: ClassResult, limits: Latency) -> Iterator[str]:
    label = f"class {name}: " if name else ""
    verdict = "meets" if own.is_met else "misses"
    yield (
        f"  {label}{own.requests} requests, {own.refused} refused, {own.attained:.1%} within objectives "
        f"({verdict} {limits.percentile:.0%}), goodput {own.goodput:.3g} requests/s, {own.hit_rate:.1%} cached"
    )
    for title, times, limit in (
        ("TTFT", own.ttft, limits.ttft),
        ("ITL", own.itl, None),
        ("mean ITL", own.mean_itl, limits.itl),
    ):
        goal = "" if limit is None else f"   objective {limit * 1000:g} ms"
        values = "  ".join(f"{part} {getattr(times, part) * 1000:8.1f}" for part in ("p50", "p90", "p95", "p99"))
        yield f"    {title:<8}  {values}  ms{goal}"


def compare(apart: Found, together: Found) -> Iterable[str]:
    """Yield sentences that say whether disaggregation pays.

    Args:
        apart: a disaggregated fleet.
        together: an aggregated one under the same load.
    """
    one, other = apart.result, together.result
    if one.is_met and other.is_met and one.cost and other.cost:
        saved = 1 - one.cost / other.cost
        what = f"it costs {one.cost:.3g} and the aggregated fleet {other.cost:.3g}, and both meet the objectives"
        better = saved
    else:
        better = one.goodput / other.goodput - 1 if other.goodput else float(one.goodput > 0)
        what = f"goodput is {one.goodput:.3g} requests/s, that of the aggregated fleet {other.goodput:.3g}"
    if better > PAYS:
        yield f"Disaggregation pays for this load: {what}."
    elif better < -PAYS:
        yield f"Disaggregation does not pay for this load: {what}."
    else:
        itl, theirs = (max((c.itl.p99 for c in own.classes.values()), default=0.0) for own in (one, other))
        yield (
            f"Disaggregation makes little difference in goodput and cost for this load: {what}. "
            f"The 99th percentile of ITL is {itl * 1000:.0f} ms with it and {theirs * 1000:.0f} ms without."
        )


def _write(arguments: dict[str, Any], load: str, found: list[Found], notes: list[str]) -> None:
    shown = Report(
        simulations=tuple(describe(own.scenario.name, load, own.scenario, own.result) for own in found),
        notes=tuple(notes),
    )
    for file, text in ((arguments["json"], shown.to_json), (arguments["html"], lambda: render(shown))):
        if file is not None:
            try:
                file.write_text(text(), "utf-8")
            except OSError as error:
                raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
