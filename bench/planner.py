"""Compare the planner with a static fleet and with llm-d's published law, on a load that swings between two extremes.

    python -m bench.planner
    python -m bench.planner --load steps --minutes 60 --seed 3

Workers are stand-ins, whose steps take as long as a formula says (`bench.planner_fleet`). The load goes from documents
(long prompts, short answers) to chats (short prompts, long answers) and back. A request is within its objectives if its
first token came in time, and if 95 % of its tokens came in time after the one before. The figure is the share of such
requests among those that arrived in a minute: the least of all minutes after the warm-up, and the share of all.

For each role, llm-d's law takes s, the mean of 45 s of min(2, P90 / objective), of TTFT or TPOT. Above
0.55, the role grows by ceil(n * (s / 0.55 * ready / n - 1)). Below 0.40, it shrinks by floor(n * (1 - s / 0.40)). It
grows by at most 100 % or 4 workers in 60 s, and shrinks by at most one in 120 s.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from bench.load import table
from bench.planner_fleet import Fleet, Request
from paceline.core.planner.actions import Action, Add, Decision, Drain, Hold
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report, Role

BUDGET = 8
TTFT, ITL = 2.0, 0.045
INTERVAL = 5.0
ROLES: tuple[Role, ...] = ("prefill", "decode")


class Kind(NamedTuple):
    """Requests of one class: mean lengths, and their rate when the load is at this extreme."""

    name: str
    prompt: int
    answer: int
    rate: float


DOCUMENTS, CHATS = Kind("documents", 3500, 100, 9.0), Kind("chats", 250, 700, 11.0)


class Policy(Protocol):
    def decide(self, report: Report) -> Decision: ...


class Static:
    """Changes nothing."""

    def decide(self, report: Report) -> Decision:
        return _decision(report, [])


class Law:
    """llm-d's law for each role."""

    def __init__(self) -> None:
        self._ratios: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in ROLES}
        self._changes: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in ROLES}

    def decide(self, report: Report) -> Decision:
        actions: list[Action] = []
        used = sum(seen.wanted for seen in report.roles.values())
        for role in ROLES:
            count = report.roles[role].wanted
            change = self._change(role, count, report)
            change = min(change, BUDGET - used) if change > 0 else max(change, 1 - count)
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
        ratios = self._ratios[role]
        values = [
            (each.ttft.percentile(0.9) / TTFT if role == "prefill" else each.itl.percentile(0.9) / ITL)
            for each in report.traffic.values()
        ]
        waits = [each.oldest_wait / TTFT for each in report.traffic.values()] if role == "prefill" else []
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


def make_planner() -> Planner:
    """Return the planner with this comparison's objectives."""
    limits = {role: RoleLimits(1, BUDGET - 1) for role in ROLES}
    return Planner(Objectives(default=Latency(TTFT, ITL, 0.95), roles=limits, budget=BUDGET))


LOADS: dict[str, Callable[[float], float]] = {
    "swing": lambda at: 0.5 + 0.5 * math.cos(2 * math.pi * at / 1200),
    "steps": lambda at: float(at % 1200 < 600),
}
"""Share of documents by the time in seconds; the rest are chats."""


class Outcome(NamedTuple):
    policy: str
    worst_minute: float
    minutes_below: int
    share: float
    devices: float
    lines: list[str]


def simulate(name: str, policy: Policy, counts: dict[Role, int], load: str, minutes: int, seed: int) -> Outcome:
    """Run one policy and judge the minutes after the warm-up of ten minutes."""
    fleet, draw = Fleet(counts), random.Random(seed)
    arrivals = random.Random(seed + 1)
    requests: list[Request] = []

    def arrive() -> None:
        share = LOADS[load](fleet.at)
        rate = share * DOCUMENTS.rate + (1 - share) * CHATS.rate
        kind = DOCUMENTS if draw.random() * rate < share * DOCUMENTS.rate else CHATS
        prompt, answer = (max(2, round(mean * draw.lognormvariate(-0.08, 0.4))) for mean in (kind.prompt, kind.answer))
        requests.append(Request(kind.name, fleet.at, prompt, answer))
        fleet.arrive(requests[-1])
        fleet.call(arrivals.expovariate(rate), arrive)

    fleet.call(0.0, arrive)
    lines = []
    for tick in range(int(minutes * 60 / INTERVAL)):
        fleet.run((tick + 1) * INTERVAL)
        decision = policy.decide(fleet.report())
        fleet.apply(decision)
        lines.append(f"{fleet.at:6.0f} s  {fleet.wanted}  {decision.line}")
    judged = defaultdict[int, list[bool]](list)
    for request in requests:
        if 600 <= request.arrived < minutes * 60 - 60:
            judged[int(request.arrived // 60)].append(is_within(request))
    shares = [statistics.fmean(minute) for minute in judged.values()]
    everything = statistics.fmean(within for minute in judged.values() for within in minute)
    below = sum(share < 0.95 for share in shares)
    for minute, values in judged.items():
        lines.append(f"{minute * 60:6d} s  hold {statistics.fmean(values):.3f}")
    return Outcome(name, min(shares), below, everything, fleet.device_seconds / (minutes * 60), lines)


def is_within(request: Request) -> bool:
    """Return whether a request kept its objectives. One that has not begun has not."""
    if not request.first or request.first - request.arrived > TTFT:
        return False
    late = sum(count for gap, count in request.gaps if gap > ITL)
    return late <= 0.05 * max(1, sum(count for _, count in request.gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", choices=LOADS, default="swing")
    parser.add_argument("--minutes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="show every decision of the planner")
    arguments = parser.parse_args()
    half: dict[Role, int] = {"prefill": BUDGET // 2, "decode": BUDGET // 2}
    policies: list[tuple[str, Policy, dict[Role, int]]] = [
        ("Paceline's planner", make_planner(), half),
        *((f"static {n} + {BUDGET - n}", Static(), _counts(n)) for n in (3, 4, 5)),
        ("llm-d's law", Law(), half),
    ]
    rows = []
    for name, policy, counts in policies:
        outcome = simulate(name, policy, counts, arguments.load, arguments.minutes, arguments.seed)
        if arguments.show and isinstance(policy, Planner):
            sys.stdout.writelines(line + "\n" for line in outcome.lines)
        rows.append(
            (
                name,
                f"{outcome.worst_minute:.1%}",
                f"{outcome.minutes_below}",
                f"{outcome.share:.1%}",
                f"{outcome.devices:.2f}",
            )
        )
    print(table(("policy", "worst minute", "minutes below 95 %", "all requests", "devices"), rows))


def _counts(prefill: int) -> dict[Role, int]:
    return {"prefill": prefill, "decode": BUDGET - prefill}


if __name__ == "__main__":
    main()
