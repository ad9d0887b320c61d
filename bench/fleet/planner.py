"""Compare the planner with static fleets and with llm-d's published law, on a load that swings between two extremes.

    python -m bench.fleet.planner
    python -m bench.fleet.planner --load live --minutes 24 --warm-up 12

Workers are stand-ins, whose steps take as long as a formula says (`bench.fleet.planner_fleet`). The load goes from
documents (long prompts, short answers) to chats (short prompts, long answers) and back. A request is within its
objectives if its first token came in time, and if 95 % of its tokens came in time after the one before. The figure is
the share of such requests among those that arrived in a minute: the least of all minutes after the warm-up, and the
share of all.

With too few devices, no fleet keeps the objectives of a minute. So each minute in which the planner has less than 95 %
is served again by every static division of the devices. Each begins without requests one minute earlier. "best
division" is the largest share that one of them reached.

For each role, llm-d's law takes s, the mean of 45 s of min(2, P90 / objective), of TTFT or TPOT. Above
0.55, the role grows by ceil(n * (s / 0.55 * ready / n - 1)). Below 0.40, it shrinks by floor(n * (1 - s / 0.40)). It
grows by at most 100 % or 4 workers in 60 s, and shrinks by at most one in 120 s.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict, deque
from functools import partial
from typing import NamedTuple, Protocol

from bench.fleet.planner_fleet import Fleet
from bench.fleet.planner_loads import LOADS, Case, make_case
from bench.fleet.planner_workers import Request
from bench.serving.load import table
from paceline.core.planner.actions import Action, Add, Decision, Drain, Hold
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report, Role

ROLES: tuple[Role, ...] = ("prefill", "decode")
GOAL = 0.95
"""The share of a minute's requests that should be within their objectives."""


class Policy(Protocol):
    def decide(self, report: Report) -> Decision: ...


class Static:
    """Changes nothing."""

    def decide(self, report: Report) -> Decision:
        return _decision(report, [])


class Law:
    """llm-d's law for each role."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._ratios: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in ROLES}
        self._changes: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in ROLES}

    def decide(self, report: Report) -> Decision:
        actions: list[Action] = []
        used = sum(seen.wanted for seen in report.roles.values())
        for role in ROLES:
            count = report.roles[role].wanted
            change = self._change(role, count, report)
            change = min(change, self._case.budget - used) if change > 0 else max(change, 1 - count)
            used += max(change, 0)
            if change:
                self._changes[role].append((report.at, change))
            if change > 0:
                actions.append(Add(role, count + change, "law"))
            for left in range(1, 1 - change):
                workers = [each.worker for each in report.workers if each.role == role and each.state == "ready"]
                actions.append(Drain(role, count - left, workers[-left], "law"))
        return _decision(report, actions)

    def _change(self, role: Role, count: int, report: Report) -> int:
        ready = sum(each.role == role and each.state == "ready" for each in report.workers)
        ratios, ttft, itl = self._ratios[role], self._case.ttft, self._case.itl
        values = [
            (each.ttft.percentile(0.9) / ttft if role == "prefill" else each.itl.percentile(0.9) / itl)
            for each in report.traffic.values()
        ]
        waits = [each.oldest_wait / ttft for each in report.traffic.values()] if role == "prefill" else []
        ratios.append((report.at, min(2.0, max(values + waits, default=0.0))))
        while ratios[0][0] <= report.at - 45:
            ratios.popleft()
        s = statistics.fmean(ratio for _, ratio in ratios)
        changes = self._changes[role]
        if s > 0.55:
            recent = sum(change for at, change in changes if at > report.at - 60 and change > 0)
            return max(0, min(math.ceil(count * (s * (ready / count) / 0.55 - 1)), max(count, 4) - recent))
        if s < 0.40:
            recent = sum(-change for at, change in changes if at > report.at - 120 and change < 0)
            return -max(0, min(math.floor(count * (1 - s / 0.40)), 1 - recent))
        return 0


def _decision(report: Report, actions: list[Action]) -> Decision:
    return Decision(report.at, report.revision, {}, tuple(actions) or (Hold("static"),), "")


class Outcome(NamedTuple):
    """The result of a fleet under a load."""

    minutes: dict[int, list[bool]]
    """For each request, whether it was within its objectives, by minute of arrival."""
    devices: float
    """Mean number of devices."""
    lines: list[str]
    """The decisions."""


def simulate(case: Case, policy: Policy, counts: dict[Role, int]) -> Outcome:
    """Let a policy change a fleet until a minute after the last arrival. The fleet begins with `counts` workers."""
    fleet, interval = Fleet(counts, case.machine), case.interval
    requests = [Request(each.name, each.at, each.prompt, each.answer) for each in case.arrivals]
    for request in requests:
        fleet.call(request.arrived, partial(fleet.arrive, request))
    lines = []
    for tick in range(math.ceil((requests[-1].arrived + 60) / interval)):
        fleet.run((tick + 1) * interval)
        decision = policy.decide(fleet.report())
        fleet.apply(decision)
        lines.append(f"{fleet.at:6.0f} s  {fleet.wanted}  {decision.line}")
    minutes = defaultdict[int, list[bool]](list)
    for request in requests:
        minutes[int(request.arrived // 60)].append(is_within(request, case))
    return Outcome(minutes, fleet.device_seconds / fleet.at, lines)


def is_within(request: Request, case: Case) -> bool:
    """Return whether a request met its objectives. A request that has not begun has not met them."""
    if not request.first or request.first - request.arrived > case.ttft:
        return False
    late = sum(count for gap, count in request.gaps if gap > case.itl)
    return late <= 0.05 * max(1, sum(count for _, count in request.gaps))


def best_division(case: Case, minute: int) -> tuple[str, float]:
    """Return the static division of all devices that serves a minute best, and the share that it reaches."""
    first = max(0, minute - 1)
    arrivals = [each for each in case.arrivals if first <= each.at // 60 <= minute]
    alone = case._replace(arrivals=[each._replace(at=each.at - 60 * first) for each in arrivals])
    reached = {
        n: statistics.fmean(simulate(alone, Static(), _counts(n, case)).minutes[minute - first])
        for n in range(1, case.budget)
    }
    best = max(reached, key=reached.__getitem__)
    return f"{best} + {case.budget - best}", reached[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", choices=LOADS, default="swing", help='"live" is that of bench.fleet.planner_live')
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=20,
        help="minutes that do not count, in which the planner learns step times, and how wrong its forecasts are",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="store_true", help="simulate only the planner")
    parser.add_argument("--show", action="store_true", help="show every decision of the planner")
    options = parser.parse_args()
    if options.warm_up >= options.minutes:
        parser.error("--warm-up must be less than --minutes, because the other minutes are judged")
    case = make_case(options.load, options.minutes, options.seed)
    half = case.budget // 2
    policies: list[tuple[str, Policy, int]] = [("Paceline's planner", Planner(case.objectives()), half)]
    if not options.only:
        policies += [(f"static {n} + {case.budget - n}", Static(), n) for n in (half - 1, half, half + 1)]
        policies.append(("llm-d's law", Law(case), half))
    outcomes = {name: simulate(case, policy, _counts(n, case)) for name, policy, n in policies}
    planned = outcomes["Paceline's planner"]
    if options.show:
        sys.stdout.writelines(line + "\n" for line in planned.lines)
    counted = options.minutes - options.warm_up
    title = ("policy", "worst minute", f"minutes below 95 % of {counted}", "all requests", "devices")
    print(table(title, [_row(name, each, options.warm_up) for name, each in outcomes.items()]))
    for minute, within in planned.minutes.items():
        if minute >= options.warm_up and (share := statistics.fmean(within)) < GOAL:
            division, most = best_division(case, minute)
            print(f"minute {minute}: {share:.1%}; best division, {division}: {most:.1%}")


def _row(name: str, outcome: Outcome, warm_up: int) -> tuple[str, ...]:
    minutes = {minute: within for minute, within in outcome.minutes.items() if minute >= warm_up}
    shares = [statistics.fmean(within) for within in minutes.values()]
    everything = statistics.fmean(one for within in minutes.values() for one in within)
    below = sum(share < GOAL for share in shares)
    return name, f"{min(shares):.1%}", f"{below}", f"{everything:.1%}", f"{outcome.devices:.2f}"


def _counts(prefill: int, case: Case) -> dict[Role, int]:
    return {"prefill": prefill, "decode": case.budget - prefill}


if __name__ == "__main__":
    main()
