"""From the result of a simulation to what its report shows."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.planner.actions import Action, Add, Decision, Drain, Flip
from paceline.core.planner.objectives import Latency
from paceline.simulator.recorder import MINUTE
from paceline.simulator.report.content import Percentiles, Series, ShownClass, ShownDecision, ShownSimulation
from paceline.simulator.result import ClassResult, Level, MinuteResult, Result
from paceline.simulator.result import Percentiles as Times
from paceline.simulator.scenario import Scenario

ALL = ""
"""Name of all requests together, as the report has it."""


def describe(name: str, load: str, scenario: Scenario, result: Result, notes: Sequence[str] = ()) -> ShownSimulation:
    """Return what the report shows of a simulation.

    Args:
        name: what was simulated, in a few words.
        load: the trace or the described load, in words.
        notes: conclusions in sentences.
    """
    profile, classes = scenario.profile, result.classes
    prompts = sum(own.prompt_tokens for own in classes.values())
    cached = sum(own.prompt_tokens * own.hit_rate for own in classes.values())
    shown = {each or "default": _class(own, scenario.objectives.latency(each)) for each, own in classes.items()}
    return ShownSimulation(
        name=name,
        load=load,
        profile=f"{profile.model} on {profile.machine}",
        fleet=_fleet(scenario),
        seconds=result.seconds,
        classes={ALL: _together(list(shown.values())), **shown},
        device_seconds=result.device_seconds,
        cost=result.cost,
        hit_rate=cached / prompts if prompts else None,
        series=(_levels(result.levels, scenario), _minutes(result)),
        decisions=tuple(_decision(each, result) for each in result.decisions),
        notes=tuple(notes),
    )


def _fleet(scenario: Scenario) -> str:
    """Return the fleet in words."""
    if scenario.is_aggregated:
        text = _workers(scenario.prefill + scenario.decode, "worker", " that computes prompts and decodes")
    else:
        text = f"{_workers(scenario.prefill, 'prefill worker')} and {_workers(scenario.decode, 'decode worker')}"
    return f"{text}, scaled by the planner" if scenario.plans else text


def _workers(count: int, what: str, more: str = "") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}{more}"


def _percentiles(times: Times, count: float) -> Percentiles:
    return Percentiles(p50=times.p50, p90=times.p90, p95=times.p95, p99=times.p99) if count else Percentiles()


def _class(own: ClassResult, latency: Latency) -> ShownClass:
    has_objectives = latency.ttft is not None or latency.itl is not None
    return ShownClass(
        requests=own.requests,
        finished=own.finished,
        refused=own.refused,
        ttft=_percentiles(own.ttft, own.finished),
        itl=_percentiles(own.itl, own.answer_tokens - own.finished),
        total=_percentiles(own.seconds, own.finished),
        ttft_objective=latency.ttft,
        itl_objective=latency.itl,
        within=own.attained if has_objectives else None,
        goodput=own.goodput,
        prompt_tokens=own.prompt_tokens,
        answer_tokens=own.answer_tokens,
        cached_tokens=round(own.prompt_tokens * own.hit_rate),
    )


def _together(shown: Sequence[ShownClass]) -> ShownClass:
    """Return the sums of all classes, and the percentiles of the slowest one."""
    requests = sum(own.requests for own in shown)
    judged = [own for own in shown if own.within is not None]

    def worst(times: Sequence[Percentiles]) -> Percentiles:
        return max(times, key=lambda each: each.p99 or 0.0, default=Percentiles())

    return ShownClass(
        requests=requests,
        finished=sum(own.finished for own in shown),
        refused=sum(own.refused for own in shown),
        ttft=worst([own.ttft for own in shown]),
        itl=worst([own.itl for own in shown]),
        total=worst([own.total for own in shown]),
        within=sum((own.within or 0.0) * own.requests for own in judged) / max(1, sum(own.requests for own in judged))
        if judged
        else None,
        goodput=sum(own.goodput for own in shown),
        prompt_tokens=sum(own.prompt_tokens for own in shown),
        answer_tokens=sum(own.answer_tokens for own in shown),
        cached_tokens=sum(own.cached_tokens for own in shown),
    )


def _levels(levels: Sequence[Level], scenario: Scenario) -> Series:
    """Return the state of the fleet over time."""
    times = scenario.profile.prefill, scenario.profile.decode
    # A worker that starts or drains occupies its devices, too; those of decode stand for both roles.
    devices = [
        level.prefill * times[0].devices + (level.decode + level.starting + level.draining) * times[1].devices
        for level in levels
    ]
    values: dict[str, Sequence[float]] = {
        "prefill": [level.prefill for level in levels],
        "decode": [level.decode for level in levels],
        "changing": [level.starting + level.draining for level in levels],
        "waiting": [level.waiting for level in levels],
        "running": [level.running for level in levels],
        "kv_usage": [level.kv_used for level in levels],
        "devices": devices,
        "cost": [count * times[1].hourly_cost for count in devices],
    }
    return Series(at=tuple(level.at for level in levels), values={name: tuple(each) for name, each in values.items()})


def _minutes(result: Result) -> Series:
    """Return what became of the requests that arrived in each minute. Percentiles are those of the slowest class."""
    by_minute: dict[int, list[MinuteResult]] = {}
    for own in result.classes.values():
        for each in own.minutes:
            by_minute.setdefault(each.minute, []).append(each)
    minutes = [by_minute.get(minute, []) for minute in range(max(by_minute, default=-1) + 1)]
    arrivals = [sum(each.arrivals for each in own) for own in minutes]
    good = [sum(each.good for each in own) for own in minutes]

    def slowest(name: str) -> tuple[float | None, ...]:
        return tuple(max((getattr(each, name) for each in own if each.finished), default=None) for own in minutes)

    return Series(
        at=tuple((minute + 1) * MINUTE for minute in range(len(minutes))),
        values={
            "arrivals": tuple(count / MINUTE for count in arrivals),
            "within": tuple(own / count if count else None for own, count in zip(good, arrivals)),
            **{name: slowest(name) for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")},
        },
    )


def _decision(decision: Decision, result: Result) -> ShownDecision:
    effects = [text for action in decision.actions if (text := _effect(action, decision.at, result.levels))]
    return ShownDecision(
        at=decision.at,
        line=decision.line,
        actions=tuple(map(_action, decision.actions)),
        effect="; ".join([*effects, *_change(decision.at, result)]),
    )


def _action(action: Action) -> str:
    match action:
        case Add() | Drain():
            return f"{action.kind} {action.role}: {action.count}"
        case Flip():
            return f"flip {action.role} to {action.to}"
    return action.kind


def _effect(action: Action, at: float, levels: Sequence[Level]) -> str:
    """Return how long an action took; "" if it was not complete at the end."""
    if not isinstance(action, Add | Drain) or action.role == "encode":
        return ""
    for level in levels:
        ready = level.prefill if action.role == "prefill" else level.decode
        if level.at >= at and (ready >= action.count if isinstance(action, Add) else ready <= action.count):
            return f"{_workers(ready, f'{action.role} worker')} after {level.at - at:.0f} s"
    return ""


def _change(at: float, result: Result) -> list[str]:
    """Return the share of good requests in the minute of a decision and two minutes later, if both are known."""
    within = _minutes(result).values["within"]
    minute = int(at / MINUTE)
    if minute + 2 >= len(within):
        return []
    before, after = within[minute], within[minute + 2]
    return [] if before is None or after is None else [f"{before:.0%} within objectives, {after:.0%} two minutes later"]
