"""The report that a decision reads, made from the members in Redis and from the platform's state. Pure."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.reports import ROLES, Report, Role, RoleReport, Steps, Traffic, WorkerReport
from paceline.proto.fleet_pb2 import ClassTraffic, HostReport, TrafficReport, WorkReport
from paceline.services.common.registry import Member
from paceline.services.common.wire import distribution_from_pb
from paceline.services.planner.asked import Changes
from paceline.services.platforms.platform import Ability, PlatformState

LOST_SECONDS = 60.0
"""Seconds for which a member that vanished without draining is reported as lost."""
MEMORIES = 8
"""Number of recent starts, drains and flips of a role whose times are kept. The longest time is the estimate for the
next start, drain or flip.
"""

_DISTRIBUTIONS = ("prompt_tokens", "answer_tokens", "ttft", "itl")
_COUNTS = ("arrivals", "finished", "refused", "started_tokens", "cached_tokens", "media_items")


class Seen(NamedTuple):
    """A member in Redis, and the age of its value in seconds."""

    member: Member
    age: float


@dataclass(slots=True)
class _Known:
    """The newest known state of a member, and the state at the previous report."""

    seen: Seen
    at: float
    since: float
    """Instant at which the member's present state was first seen."""
    member_before: Member | None = None
    """The member as it was at the previous report, to count requests and steps since then."""


@dataclass(slots=True)
class _Times:
    """Recently measured starts, drains and flips of one role."""

    startups: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORIES))
    drains: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORIES))
    flips: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORIES))
    """Times of recent flips from this role to another one, in seconds."""


class ReportBuilder:
    """Makes the reports of one fleet. It remembers earlier members, because services publish totals.

    Args:
        startup_seconds: estimated time of a start, used until a worker of the role was seen to start.
        drain_seconds: estimated time of a drain, used until a worker of the role was seen to drain.
        flip_seconds: estimated time of a flip, used until a worker was seen to leave the role for another one.
    """

    def __init__(self, startup_seconds: float = 60.0, drain_seconds: float = 30.0, flip_seconds: float = 5.0) -> None:
        self._estimates = startup_seconds, drain_seconds, flip_seconds
        self._shares_cores = dict.fromkeys(ROLES, True)
        """For each role, whether its most recently ready workers take turns on shared cores. True before any worker was
        ready.
        """
        self._known: dict[str, _Known] = {}
        self._times: dict[str, _Times] = {role: _Times() for role in ROLES}
        self._reported_at: float | None = None
        self._began: float | None = None
        self._seen_at = 0.0
        """Time at which the members were last read."""

    def observe(self, now: float, members: Iterable[Seen]) -> None:
        """Note the members that Redis lists at the instant `now`. Call this more often than `report`."""
        self._began = now if self._began is None else self._began
        self._seen_at = now
        listed = {seen.member.worker_id: seen for seen in members}
        for name, seen in listed.items():
            known = self._known.get(name)
            if known is None or known.seen.member.epoch != seen.member.epoch:
                self._known[name] = _Known(seen, now, now - seen.member.work.state_seconds)
                self._note_start(seen.member, known)
                self._note_flip(seen.member, known, now)
                continue
            if known.seen.member.state != seen.member.state:
                known.since = now
                self._note_start(seen.member, known)
            known.seen, known.at = seen, now
        for role in ROLES:
            ready = [each for each, _ in listed.values() if (each.role, each.state) == (role, "ready")]
            if ready:
                self._shares_cores[role] = any(each.work.shares_cores for each in ready)
        for name in self._known.keys() - listed.keys():
            known = self._known[name]
            if known.seen.member.state == "draining":
                self._note_end(known)
                del self._known[name]
            elif now >= known.at + LOST_SECONDS:
                del self._known[name]

    def report(
        self,
        now: float,
        platform: PlatformState,
        pinned: Mapping[Role, int],
        abilities: Collection[Ability],
        changes: Mapping[Role, Changes] | None = None,
    ) -> Report:
        """Return the report on the observed members. It counts requests and steps since the previous report.

        Args:
            pinned: numbers of workers that people have set.
            abilities: abilities of the platform.
            changes: for each role, the seconds since planners changed it; None if unknown.
        """
        self._forget_ended(platform)
        hosts = {known.seen.member.worker_id: known.seen.member.host for known in self._of("kvtransfer")}
        gateways = list(self._of("gateway"))
        lost = [known for known in gateways if now > known.at]
        fresh = [known.seen.age for known in gateways if now <= known.at]
        traffic = self._traffic(gateways, now)
        workers = tuple(
            self._worker(known, now, hosts, abilities) for role in platform.roles for known in self._of(role)
        )
        self._reported_at = now
        for known in self._known.values():
            known.member_before = known.seen.member
        return Report(
            at=now,
            revision=revision_of(platform, pinned, workers),
            workers=workers,
            roles={
                role: self._role(role, platform, pinned, (changes or {}).get(role, Changes()), abilities)
                for role in platform.roles
            },
            traffic=traffic,
            traffic_age=max(fresh, default=now - max((known.at for known in gateways), default=self._began or now)),
            gateways_lost=len(lost),
        )

    def waits_without_worker(self) -> bool:
        """Return whether requests wait although no worker that they need first serves or starts."""
        waiting = any(load.waiting for known in self._of("gateway") for load in known.seen.member.traffic.classes)
        return waiting and not any(
            known.seen.member.state != "draining" for role in ("decode", "pool") for known in self._of(role)
        )

    def _of(self, role: str) -> list[_Known]:
        return [known for _, known in sorted(self._known.items()) if known.seen.member.role == role]

    def _note_start(self, member: Member, before: _Known | None) -> None:
        """Remember how long a worker took to start, when it is seen to be ready for the first time."""
        times = self._times.get(member.role)
        if times is None or member.state != "ready" or member.work.startup_seconds <= 0:
            return
        if before is None or before.seen.member.epoch != member.epoch or before.seen.member.state == "starting":
            times.startups.append(member.work.startup_seconds)

    def _note_flip(self, member: Member, before: _Known | None, now: float) -> None:
        """Remember how long a worker took to leave its role and to serve in another one."""
        role = None if before is None else before.seen.member.role
        if before is None or role == member.role or member.state != "ready" or role not in self._times:
            return
        # An idle worker changes its role in less time than lies between two observations.
        began = before.since if before.seen.member.state == "draining" else before.at
        self._times[role].flips.append(now - began)

    def _note_end(self, known: _Known) -> None:
        times = self._times.get(known.seen.member.role)
        if times is not None:
            times.drains.append(known.at - known.since)

    def _forget_ended(self, platform: PlatformState) -> None:
        """Forget workers that vanished, if the platform runs no workers besides the others."""
        for role, state in platform.roles.items():
            gone = [known for known in self._of(role) if known.at < self._seen_at]
            here = [known for known in self._of(role) if known.at == self._seen_at]
            if sum(known.seen.member.state != "draining" for known in here) >= state.running:
                for known in gone:
                    # An idle worker drains in less time than lies between two observations.
                    self._times[role].drains.append(self._seen_at - known.at)
                    del self._known[known.seen.member.worker_id]

    def _role(
        self,
        role: Role,
        platform: PlatformState,
        pinned: Mapping[Role, int],
        changes: Changes,
        abilities: Collection[Ability],
    ) -> RoleReport:
        startup, drain, flip = self._estimates
        times = self._times[role]
        return RoleReport(
            wanted=platform.roles[role].wanted,
            pinned=pinned.get(role),
            grown_seconds=changes.grown,
            shrunk_seconds=changes.shrunk,
            startup_seconds=max(times.startups, default=startup),
            drain_seconds=max(times.drains, default=drain),
            flip_seconds=max(times.flips, default=flip),
            shares_cores=self._shares_cores[role] and "spread" not in abilities,
        )

    def _worker(
        self, known: _Known, now: float, hosts: Mapping[str, HostReport], abilities: Collection[Ability]
    ) -> WorkerReport:
        member, age = known.seen
        pressure, tokens = self._kv(member, hosts.get(member.host_id))
        shares_memory = not member.work.kv_tokens and "spread" not in abilities
        others: dict[str, tuple[Role, ...]] = {"prefill": ("decode",), "decode": ("prefill",)}
        before = known.member_before
        return WorkerReport(
            worker=member.worker_id,
            role=member.role,  # type: ignore[arg-type]  # a role of the platform
            host=member.host_id,
            state=member.state,
            state_seconds=max(now - known.since, member.work.state_seconds),
            age=age + now - known.at,
            running=member.load.running,
            waiting=member.load.waiting,
            queued_tokens=member.load.queued_tokens,
            max_seqs=member.max_seqs or 1,
            kv_pressure=pressure,
            kv_tokens=0 if shares_memory else tokens,
            shares_memory=shares_memory,
            flips_to=others.get(member.role, ()) if "flip" in abilities else (),
            # In an arena the KV stays on the host, so only the tokens of each request's last block are lost.
            loss=member.work.computed_tokens if member.work.kv_tokens else 16.0 * member.load.running,
            steps=() if before is None or before.epoch != member.epoch else _steps_since(before.work, member.work),
        )

    def _kv(self, member: Member, host: HostReport | None) -> tuple[float, int]:
        """Return the pressure on the memory that has a worker's KV, and the tokens of the worker's share of this
        memory.
        """
        if member.work.kv_tokens:
            return member.work.kv_pressure, member.work.kv_tokens
        if host is None or not host.blocks or member.state == "starting":
            return 0.0, 0
        others = (known.seen.member for known in self._of(member.role))
        sharing = sum(each.host_id == member.host_id and each.state != "starting" for each in others)
        return host.used_blocks / host.blocks, host.kv_tokens // max(1, sharing)

    def _traffic(self, gateways: Iterable[_Known], now: float) -> dict[str, Traffic]:
        """Return the requests of all gateways since the report before, by class."""
        interval = 0.0 if self._reported_at is None else now - self._reported_at
        gains: dict[str, list[_Gain]] = {}
        seconds = 0.0
        for known in gateways:
            before, member = known.member_before, known.seen.member
            earlier = before.traffic if before is not None and before.epoch == member.epoch else TrafficReport()
            if before is None and member.traffic.seconds > 2 * interval:
                earlier = member.traffic  # its counts began long before this planner did
            seconds = max(seconds, member.traffic.seconds - earlier.seconds)
            for name, gain in _gains(earlier, member.traffic).items():
                gains.setdefault(name, []).append(gain)
        return {name: _merged(parts, seconds) for name, parts in gains.items()}


class _Gain(NamedTuple):
    """One gateway's counts of one class since the report before."""

    now: ClassTraffic
    counts: Mapping[str, int]
    distributions: Mapping[str, Distribution]


def _gains(before: TrafficReport, after: TrafficReport) -> dict[str, _Gain]:
    earlier = {each.name: each for each in before.classes}
    return {each.name: _gain(earlier.get(each.name, ClassTraffic()), each) for each in after.classes}


def _gain(before: ClassTraffic, after: ClassTraffic) -> _Gain:
    counts = {name: max(0, getattr(after, name) - getattr(before, name)) for name in _COUNTS}
    distributions = {
        name: distribution_from_pb(getattr(after, name)).since(distribution_from_pb(getattr(before, name)))
        for name in _DISTRIBUTIONS
    }
    return _Gain(after, counts, distributions)


def _merged(gains: list[_Gain], seconds: float) -> Traffic:
    """Return the traffic of one class in all gateways."""
    counts: dict[str, Any] = {name: sum(gain.counts[name] for gain in gains) for name in _COUNTS}
    values: dict[str, Any] = {
        name: Distribution.merged(gain.distributions[name] for gain in gains) for name in _DISTRIBUTIONS
    }
    waiting = sum(gain.now.waiting for gain in gains)
    oldest = max((gain.now.oldest_wait_seconds for gain in gains), default=0.0)
    return Traffic(seconds=seconds, waiting=waiting, oldest_wait=oldest, **counts, **values)


def _steps_since(before: WorkReport, after: WorkReport) -> tuple[Steps, ...]:
    """Return the steps between two reports of one worker, by load. A load that the worker had forgotten counts anew."""
    earlier = {load.load: load for load in before.steps}
    found = []
    for load in after.steps:
        tokens, context, seconds = load.tokens, load.context, distribution_from_pb(load.seconds)
        if (old := earlier.get(load.load)) is not None and old.tokens <= tokens and old.context <= context:
            tokens, context = tokens - old.tokens, context - old.context
            seconds = seconds.since(distribution_from_pb(old.seconds))
        if steps := seconds.count:
            found.append(Steps(tokens / steps, context / steps, seconds))
    return tuple(found)


def revision_of(platform: PlatformState, pinned: Mapping[Role, int], workers: Iterable[WorkerReport] = ()) -> str:
    """Return a digest of the platform's targets, pins and roles. It changes if anybody changes them."""
    wanted = sorted((role, state.wanted) for role, state in platform.roles.items())
    text = repr((wanted, sorted(pinned.items()), sorted((each.worker, each.role) for each in workers)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
