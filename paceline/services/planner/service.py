"""The planner's service: it reads reports, lets the pure planner decide, and carries out the decisions.

Every planner of a cluster decides, so that each knows the fleet. Only the one with the lease acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.errors import UnavailableError
from paceline.core.planner.actions import Action, Add, Decision, Drain, Flip, Hold
from paceline.core.planner.objectives import limits_of
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report, Role
from paceline.proto.fleet_pb2 import Decided, PlanReport
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.pins import Pins
from paceline.services.common.registry import Member, read_ages, read_members
from paceline.services.common.seals import Seal
from paceline.services.planner.asked import Asked
from paceline.services.planner.lease import LeaderLease
from paceline.services.planner.metrics import PlannerMetrics
from paceline.services.planner.recording import RecordFile
from paceline.services.planner.reports import ReportBuilder, Seen, revision_of
from paceline.services.platforms.platform import Platform, PlatformState

TICK_SECONDS = 1.0
"""Interval at which Redis is read, in seconds. The planner notices a request that waits for the first worker within
this time.
"""
CALL_SECONDS = 60.0
"""Deadline of one call to the platform, in seconds."""
HANDOVER_SECONDS = 2.0
"""Least time between the previous planner's last decision and this planner's first one, in seconds. By then, the
other's last drains are known from the workers' reports.
"""
KEPT = 20
"""Number of newest decisions that `/fleet` shows. If consecutive decisions have the same line, only the last is
kept.
"""

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class _Past(NamedTuple):
    """A decision in the form that `/fleet` shows to people."""

    at: float
    line: str
    acted: bool


class PlannerService:
    """One planner of a cluster, from `run` to its end.

    Args:
        platform: starts and stops the workers.
        seal: seals what planners and gateways write to Redis for planners.
        name: name of this planner, unique among all planners that ever run.
        drain_seconds: the longest time that a worker drains. It also is the estimated time until the planner has seen a
            drain.
        record: the planner's record; None records nothing.
        on_decision: called after each decision.
    """

    def __init__(
        self,
        planner: Planner,
        platform: Platform,
        client: Redis,
        cluster: str,
        signatures: MemberSignatures,
        seal: Seal,
        name: str,
        drain_seconds: float = 30.0,
        record: RecordFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[], object] = lambda: None,
    ) -> None:
        self.metrics = PlannerMetrics()
        self._on_decision = on_decision
        self._planner = planner
        self._platform = platform
        self._client = client
        self._cluster = cluster
        self._signatures = signatures
        self._record = record
        self._clock = clock
        self._lease = LeaderLease(client, cluster, seal, name)
        self._pins = Pins(client, cluster, seal)
        self._builder = ReportBuilder(drain_seconds=drain_seconds)
        self._asked = Asked(client, cluster, seal)
        self._past: deque[_Past] = deque(maxlen=KEPT)
        self._next = 0.0
        """Time at which the next decision is due, on the clock."""
        self._has_taken_over = False
        """Whether the previous planner's numbers were read since this planner got the lease."""
        self._roles: tuple[Role, ...] = ()
        """Roles that the platform could scale when its state was last read."""
        self._sleeps = False
        """Whether a worker of the model slept when the members were last read. The fleet stays as it is then."""
        self._told: set[Role] = set()
        """Roles whose sharing of cores was logged already."""
        self._trouble = ""
        """The service that did not answer at the last tick; empty if all did."""

    async def run(self, stop: asyncio.Event) -> None:
        """Plan until `stop` is set, then let another planner act. Workers keep running."""
        try:
            while not stop.is_set():
                await self.tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):
                        await stop.wait()
        finally:
            await self._lease.release()
            if self._record is not None:
                self._record.close()

    async def tick(self) -> None:
        """Observe the fleet, and decide if a decision is due. If Redis or the platform does not answer, do nothing."""
        now = self._clock()
        try:
            await self._look(now)
            # Workers that sleep would look superfluous, and their missing figures like those of an idle fleet.
            if not self._sleeps and (now >= self._next or self._builder.waits_without_worker()):
                self._next = now + self._planner.objectives.fast_seconds
                await self._decide(now)
            self._note_trouble("")
        except (RedisError, OSError, TimeoutError) as error:
            self._note_trouble("redis", f"Redis does not answer ({error or 'no answer in time'})")
        except UnavailableError as error:
            self._note_trouble("platform", str(error))
        except Exception:
            log.exception("unexpected error in the planner; the fleet stays as it is")

    def report(self) -> PlanReport:
        """Return the report of this planner that `/fleet` shows."""
        now, objectives = self._clock(), self._planner.objectives
        return PlanReport(
            leads=self._lease.is_held,
            advisory=objectives.advisory,
            decisions=[Decided(age_seconds=now - past.at, line=past.line, acted=past.acted) for past in self._past],
            pinned={str(role): count for role, count in self._pins.now.items()},
            may_be_empty=[
                role for role in self._roles if (limits := objectives.limits(role)).most and not limits.least
            ],
        )

    async def _look(self, now: float) -> None:
        """Read the members and renew the lease. Raises RedisError."""
        members = await read_members(self._client, self._cluster, self._signatures)
        self._sleeps = _sleeps(members)
        ages = await read_ages(self._client, self._cluster, members)
        self._builder.observe(now, map(Seen, members, ages))
        self.metrics.leads = await self._lease.renew()
        if not self.metrics.leads:
            self._has_taken_over = False
        elif not self._has_taken_over:
            log.info("this planner acts")
            if await self._asked.read():
                self._next = now + HANDOVER_SECONDS
            await self._pins.read()
            self._platform.take_over()
            self._has_taken_over = True

    async def _decide(self, now: float) -> None:
        """Make a decision and carry it out. Raises RedisError or UnavailableError."""
        state = await self._state()
        if self._lease.is_held:
            await self._note_edits(state)
        await self._pins.read()
        pinned = self._pins.now
        changes = await self._asked.changes()
        report = self._builder.report(now, state, pinned, self._platform.abilities, changes)
        if self._lease.is_held:
            self._note_sharing(report)
        decision = (self._record or self._planner).decide(report)
        self.metrics.count(decision)
        self.metrics.pinned, self.metrics.report_age = len(pinned), report.traffic_age
        acted = False
        try:
            acted = await self._carry_out(decision, report, pinned)
        finally:
            self._note(decision, acted)

    async def _carry_out(self, decision: Decision, report: Report, pinned: dict[Role, int]) -> bool:
        """Carry out a decision, unless this planner may not act or somebody else has acted. Return whether it was
        carried out.
        """
        actions = [action for action in decision.actions if not isinstance(action, Hold)]
        if not actions or decision.advisory or not self._lease.is_held:
            return False
        state = await self._state()
        if revision_of(state, pinned, report.workers) != decision.expects:
            log.info("not done, because somebody else has changed the fleet meanwhile: %s", decision.line)
            return False
        before = {role: counts.wanted for role, counts in state.roles.items()}
        for action in actions:
            after = _after(action, before)
            await self._asked.note(before, after, pinned)
            await self._call(self._act(action))
            before |= after
        return True

    async def _act(self, action: Action) -> None:
        match action:
            case Add(role, count):
                await self._platform.scale(role, count)
            case Drain(role, count, worker):
                await self._platform.scale(role, count, [worker] if worker else [])
            case Flip(worker, _, to):
                await self._platform.flip(worker, to)

    async def _state(self) -> PlatformState:
        state = await self._call(self._platform.state())
        self._roles = tuple(state.roles)
        return state

    async def _call(self, call: Awaitable[Answer]) -> Answer:
        """Return the platform's answer. Raises UnavailableError if it takes too long."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await call
        except TimeoutError:
            raise UnavailableError(f"{self._platform.name} did not answer within {CALL_SECONDS:g} s") from None

    # ---- what people have changed

    async def _note_edits(self, state: PlatformState) -> None:
        """Pin each role whose number of workers is not what a planner has asked for. Raises RedisError."""
        edits = self._asked.edits(state)
        for role, count in edits.items():
            log.warning("somebody has set %s to %d; it stays so until: paceline scale --release %s", role, count, role)
        if edits:
            await self._pins.replace(edits)

    # ---- what people see

    def _note_sharing(self, report: Report) -> None:
        """Log once for each role that its workers share cores, and that therefore no further one is started."""
        objectives = self._planner.objectives
        for role in {each.role for each in report.workers if each.state == "ready"} - self._told:
            most, wanted = limits_of(role, report, objectives).most, report.roles[role].wanted
            if most <= wanted < objectives.limits(role).most and report.roles[role].pinned is None:
                self._told.add(role)
                why = "it would share the cores of those that are there; --threads gives a worker a part of the cores"
                log.warning("no further %s worker is started: %s", role, why)

    def _note(self, decision: Decision, acted: bool) -> None:
        is_new = not self._past or self._past[-1].line != decision.line
        if acted or (decision.advisory and is_new):
            log.info("%s%s", "would do: " if decision.advisory else "", decision.line)
        elif is_new:
            log.debug("%s", decision.line)
        if not is_new and not acted:
            self._past.pop()
        self._past.append(_Past(decision.at, decision.line, acted))
        self._on_decision()

    def _note_trouble(self, what: str, why: str = "") -> None:
        if what:
            self.metrics.failures[what] += 1
        if what != self._trouble:
            if what:
                log.warning("%s; the fleet stays as it is", why)
            else:
                log.info("%s answers again", self._trouble)
        self._trouble = what


def _sleeps(members: Sequence[Member]) -> bool:
    """Return whether a worker of the gateways' model sleeps, or any worker if there are no gateways."""
    models = {member.model for member in members if member.role == "gateway"}
    sleeping = {member.model for member in members if member.state == "sleeping"}
    return bool(sleeping & models if models else sleeping)


def _after(action: Action, before: Mapping[Role, int]) -> dict[Role, int]:
    """Return the numbers of workers after an action, for the roles that it changes."""
    match action:
        case Add(role, count) | Drain(role, count):
            return {role: count}
        case Flip(_, role, to):
            return {role: before.get(role, 0) - 1, to: before.get(to, 0) + 1}
        case Hold():
            return {}
