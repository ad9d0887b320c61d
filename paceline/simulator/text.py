"""The result of a simulation in lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.planner.objectives import Latency
from paceline.simulator.report.describe import effect_of
from paceline.simulator.result import ClassResult
from paceline.simulator.search import Found


def three_digits(number: float) -> str:
    """Return a number with at least three significant digits and without an exponent, such as 1834 and 0.0123."""
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def lines(found: Found) -> Iterator[str]:
    """Yield the lines that a terminal shows about a fleet and its results."""
    scenario, result = found.scenario, found.result
    devices = result.device_seconds / result.seconds if result.seconds else 0.0
    yield scenario.name
    yield (
        f"  {result.seconds:.0f} s simulated, {devices:.1f} devices on average, cost {three_digits(result.cost)} "
        f"({result.cost / max(1e-9, result.seconds) * 3600:.2f} an hour)"
    )
    for name, class_result in sorted(result.classes.items()):
        yield from _class_lines(name, class_result, scenario.objectives.latency(name))
    busy = ", ".join(f"{role} workers compute {share:.0%} of the time" for role, share in result.busy.items() if share)
    loads = f", {result.adapter_loads} adapters read" if result.adapter_loads else ""
    yield f"  {busy or 'no worker computed'}; {result.preemptions} preemptions{loads}"
    for decision in result.decisions:
        yield f"  {decision.at:7.0f} s  {decision.line}"
        if effect := effect_of(decision, result):
            yield f"             -> {effect}"


def _class_lines(name: str, found: ClassResult, limits: Latency) -> Iterator[str]:
    label = f"class {name}: " if name else ""
    verdict = "meets" if found.is_met else "misses"
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(found.refusals.items()))
    yield (
        f"  {label}{found.requests} requests, {found.refused} refused{f' ({why})' if why else ''}, "
        f"{found.attained:.1%} within objectives ({verdict} {limits.percentile:.0%}), "
        f"goodput {three_digits(found.goodput)} requests/s, {found.hit_rate:.1%} cached"
    )
    for title, times, limit in (
        ("TTFT", found.ttft, limits.ttft),
        ("ITL", found.itl, None),
        ("mean ITL", found.mean_itl, limits.itl),
    ):
        goal = "" if limit is None else f"   objective {limit * 1000:g} ms"
        values = "  ".join(f"{part} {getattr(times, part) * 1000:8.1f}" for part in ("p50", "p90", "p95", "p99"))
        yield f"    {title:<8}  {values}  ms{goal}"
