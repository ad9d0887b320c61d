"""The description of a simulation's result for its report."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.planner.actions import Action, Add, Decision, Drain, Flip, Hold
from paceline.core.planner.objectives import Latency
from paceline.simulator.recorder import MINUTE
from paceline.simulator.report.content import (
    ReportPercentiles,
    ReportSeries,
    ShownClass,
    ShownDecision,
    ShownSimulation,
)
from paceline.simulator.result import ClassResult, Level, MinuteResult, Result
from paceline.simulator.result import Percentiles as Times
from paceline.simulator.scenario import Scenario

ALL = ""
"""Name that the report uses for all requests together."""


def describe(name: str, load: str, scenario: Scenario, result: Result, notes: Sequence[str] = ()) -> ShownSimulation:
    """Return the part of the report about one simulation.

    Args:
        name: name of the simulated fleet, in a few words.
        load: the trace or the described load, in words.
        notes: conclusions in sentences.
    """
    profile, classes = scenario.profile, result.classes
    shown = {each or "default": _class(found, scenario.objectives.latency(each)) for each, found in classes.items()}
    return ShownSimulation(
        name=name,
        load=load,
        profile=f"{profile.model} on {profile.machine}",
        fleet=_fleet(scenario),
        seconds=result.seconds,
        classes={ALL: _together(list(shown.values())), **shown},
        device_seconds=result.device_seconds,
        cost=result.cost,
        hit_rate=result.hit_rate if classes else None,
        series=(_levels(result.levels), _minutes(result)),
        decisions=tuple(_decision(each, result) for each in result.decisions),
        notes=tuple(notes),
    )


def _fleet(scenario: Scenario) -> str:
    """Return the fleet at the beginning and the way in which it is scaled, in words."""
    if scenario.is_aggregated:
        text = _workers(scenario.prefill + scenario.decode, "worker", " that computes prompts and decodes")
    else:
        text = f"{_workers(scenario.prefill, 'prefill worker')} and {_workers(scenario.decode, 'decode worker')}"
    return f"{text}, scaled by the planner" if scenario.plans else text


def _workers(count: int, what: str, more: str = "") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}{more}"


def _percentiles(times: Times, count: float) -> ReportPercentiles:
    return (
        ReportPercentiles(p50=times.p50, p90=times.p90, p95=times.p95, p99=times.p99) if count else ReportPercentiles()
    )


def _class(result: ClassResult, latency: Latency) -> ShownClass:
    has_objectives = latency.ttft is not None or latency.itl is not None
    return ShownClass(
        requests=result.requests,
        finished=result.finished,
        refused=result.refused,
        refusals=result.refusals,
        ttft=_percentiles(result.ttft, result.finished),
        itl=_percentiles(result.itl, result.answer_tokens - result.finished),
        total=_percentiles(result.seconds, result.finished),
        ttft_objective=latency.ttft,
        itl_objective=latency.itl,
        within=result.attained if has_objectives else None,
        goodput=result.goodput,
        prompt_tokens=result.prompt_tokens,
        answer_tokens=result.answer_tokens,
        cached_tokens=round(result.prompt_tokens * result.hit_rate),
    )


def _together(shown: Sequence[ShownClass]) -> ShownClass:
    """Return the sums of all classes, and the percentiles of the slowest one."""
    requests = sum(one.requests for one in shown)
    judged = [one for one in shown if one.within is not None]

    def worst(times: Sequence[ReportPercentiles]) -> ReportPercentiles:
        return max(times, key=lambda each: each.p99 or 0.0, default=ReportPercentiles())

    return ShownClass(
        requests=requests,
        finished=sum(one.finished for one in shown),
        refused=sum(one.refused for one in shown),
        ttft=worst([one.ttft for one in shown]),
        itl=worst([one.itl for one in shown]),
        total=worst([one.total for one in shown]),
        within=sum((one.within or 0.0) * one.requests for one in judged) / max(1, sum(one.requests for one in judged))
        if judged
        else None,
        goodput=sum(one.goodput for one in shown),
        prompt_tokens=sum(one.prompt_tokens for one in shown),
        answer_tokens=sum(one.answer_tokens for one in shown),
        cached_tokens=sum(one.cached_tokens for one in shown),
    )


def _levels(levels: Sequence[Level]) -> ReportSeries:
    """Return the sampled states of the fleet as a series."""
    values: dict[str, Sequence[float]] = {
        "prefill": [level.prefill for level in levels],
        "decode": [level.decode for level in levels],
        "changing": [level.starting + level.draining for level in levels],
        "waiting": [level.waiting for level in levels],
        "running": [level.running for level in levels],
        "kv_usage": [level.kv_used for level in levels],
        "devices": [level.devices for level in levels],
        "cost": [level.cost for level in levels],
    }
    return ReportSeries(
        at=tuple(level.at for level in levels), values={name: tuple(each) for name, each in values.items()}
    )


def _minutes(result: Result) -> ReportSeries:
    """Return the results of the requests that arrived in each minute. Percentiles are taken from the slowest class."""
    by_minute: dict[int, list[MinuteResult]] = {}
    for class_result in result.classes.values():
        for each in class_result.minutes:
            by_minute.setdefault(each.minute, []).append(each)
    minutes = [by_minute.get(minute, []) for minute in range(max(by_minute, default=-1) + 1)]
    arrivals = [sum(each.arrivals for each in minute) for minute in minutes]

    def slowest(name: str) -> tuple[float | None, ...]:
        return tuple(max((getattr(each, name) for each in minute if each.finished), default=None) for minute in minutes)

    return ReportSeries(
        at=tuple((minute + 1) * MINUTE for minute in range(len(minutes))),
        values={
            "arrivals": tuple(count / MINUTE for count in arrivals),
            "within": tuple(result.within()),
            **{name: slowest(name) for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")},
        },
    )


def _decision(decision: Decision, result: Result) -> ShownDecision:
    return ShownDecision(
        at=decision.at,
        line=decision.line,
        actions=tuple(map(_action, decision.actions)),
        effect=effect_of(decision, result),
    )


def effect_of(decision: Decision, result: Result) -> str:
    """Return the effect of a decision, in words: the time that it took, and the share of good requests before and
    after.
    """
    effects = dict.fromkeys(_effect(action, decision, result.levels) for action in decision.actions)
    return "; ".join([*filter(None, effects), *_change(decision.at, result)])


def _action(action: Action) -> str:
    match action:
        case Add() | Drain():
            return f"{action.kind} {action.role}: {action.count}"
        case Flip():
            return f"flip {action.role} to {action.to}"
    return action.kind


def _effect(action: Action, decision: Decision, levels: Sequence[Level]) -> str:
    """Return a text with the time that an action took; "" if it was not complete at the end."""
    match action:
        case Hold():
            return ""
        case Flip():
            role, count, grows = action.to, decision.wanted.get(action.to, 0), True
        case Add() | Drain():
            role, count, grows = action.role, action.count, isinstance(action, Add)
    for level in levels:
        ready = level.prefill if role == "prefill" else level.decode
        if level.at >= decision.at and (ready >= count if grows else ready <= count):
            return f"{_workers(ready, f'{role} worker')} after {level.at - decision.at:.0f} s"
    return ""


def _change(at: float, result: Result) -> list[str]:
    """Return the share of good requests in the minute of a decision and two minutes later, if both are known."""
    within = result.within()
    minute = int(at / MINUTE)
    if minute + 2 >= len(within):
        return []
    before, after = within[minute], within[minute + 2]
    return [] if before is None or after is None else [f"{before:.0%} within objectives, {after:.0%} two minutes later"]
