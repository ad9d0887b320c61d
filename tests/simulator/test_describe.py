"""What the report shows of a simulation."""

from __future__ import annotations

from paceline.core.planner.actions import Add, Decision, Flip
from paceline.core.planner.objectives import Latency, Objectives
from paceline.core.step_times import Curve, Profile, StepTimes, WorkerTimes
from paceline.simulator.report.describe import describe
from paceline.simulator.result import ClassResult, Level, MinuteResult, Percentiles, Result
from paceline.simulator.scenario import Scenario

TIMES = WorkerTimes(steps=StepTimes(prefill=Curve(points=((1, 0.01),)), decode=Curve(points=((1, 0.01),))), devices=2)
PROFILE = Profile(machine="a machine", model="a model", token_bytes=1.0, prefill=TIMES, decode=TIMES)


def minute(number: int, arrivals: int, good: int) -> MinuteResult:
    return MinuteResult(number, arrivals, good, 0, arrivals, 0.1 * good, 0.2 * good, 0.01, 0.02)


def own_class(p99: float, minutes: list[MinuteResult]) -> ClassResult:
    times = Percentiles(p99, p99, p99, p99, p99)
    arrivals, good = sum(each.arrivals for each in minutes), sum(each.good for each in minutes)
    return ClassResult(
        requests=arrivals,
        finished=arrivals,
        refused=0,
        refusals={},
        good=good,
        attained=good / arrivals,
        is_met=False,
        goodput=good / 180,
        hit_rate=0.25,
        prompt_tokens=1000,
        answer_tokens=500,
        attempts=arrivals,
        ttft=times,
        itl=times,
        mean_itl=times,
        seconds=times,
        queued=times,
        minutes=minutes,
    )


def result(**more: object) -> Result:
    chats = own_class(1.0, [minute(0, 10, 5), minute(2, 10, 10)])
    batches = own_class(9.0, [minute(0, 10, 10)])
    levels = [
        Level(at, 1, 1 + (at >= 70), 0, 0, 3, 0, 0.5, 4 + 2 * (at >= 70), 8.0) for at in (0.0, 10.0, 60.0, 70.0, 180.0)
    ]
    decisions = [
        Decision(
            12.0,
            "r",
            {"decode": 2},
            (Add("decode", 2, "late"), Flip("w1", "prefill", "decode", "late")),
            "add decode: late",
        )
    ]
    values = {"classes": {"chat": chats, "batch": batches}, "levels": levels, "decisions": decisions, **more}
    return Result(
        seconds=180.0,
        prefill=1,
        decode=1,
        is_aggregated=False,
        device_seconds=540.0,
        cost=3.0,
        preemptions=0,
        adapter_loads=0,
        busy={},
        **values,  # type: ignore[arg-type]
    )


def test_all_classes_together_have_the_percentiles_of_the_slowest_one() -> None:
    objectives = Objectives(classes={"batch": Latency(None, None)})
    shown = describe("a fleet", "a trace", Scenario(PROFILE, 1, 1, objectives), result())
    assert list(shown.classes) == ["", "chat", "batch"]
    assert (shown.classes[""].requests, shown.classes[""].ttft.p99) == (30, 9.0)
    assert shown.classes["batch"].within is None
    assert shown.classes[""].within == shown.classes["chat"].within == 0.75
    assert shown.hit_rate == 0.25
    assert shown.fleet == "1 prefill worker and 1 decode worker"


def test_a_decision_tells_what_came_of_it() -> None:
    shown = describe("a fleet", "a trace", Scenario(PROFILE, 1, 1, plans=True), result())
    (decision,) = shown.decisions
    assert decision.actions == ("add decode: 2", "flip prefill to decode")
    assert decision.effect == "2 decode workers after 58 s; 75% within objectives, 100% two minutes later"
    levels, minutes = shown.series
    assert levels.values["devices"] == (4, 4, 4, 6, 6)
    assert minutes.values["within"] == (0.75, None, 1.0)
    assert minutes.values["ttft_p99"] == (2.0, None, 2.0)


def test_a_simulation_without_requests_can_be_shown() -> None:
    shown = describe(
        "a fleet", "nothing", Scenario(PROFILE, 0, 1, is_aggregated=True), result(classes={}, decisions=[])
    )
    assert shown.classes[""].requests == 0
    assert shown.hit_rate is None
