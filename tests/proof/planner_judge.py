"""The promises of the planner, checked at every decision of a model run."""

from __future__ import annotations

import itertools

from paceline.core.planner.actions import Add, Decision, Drain, Flip, Hold
from paceline.core.planner.reports import Report, Role
from tests.proof.planner_reports import ENCODE_SECONDS, ENCODED, step_seconds
from tests.proof.planner_world import CHUNK, CHUNK_SECONDS, SETTLE, SHARED_SEQS, TICK, World, apply
from tests.proof.world import Violation

MEASURED_TICKS = 6
"""Ticks in the half minute over which planners measure the load."""


def check_decision(world: World, which: int, seen: Report, decision: Decision) -> None:
    """Check a decision against the report that it was made from. `world` is still as it was before."""
    if decision.expects != seen.revision or not decision.line or "\n" in decision.line:
        raise Violation("the decision does not say what it was made from, or why")
    _check_wanted(seen, decision)
    _check_pauses(seen, decision)
    _check_streams(world, seen, decision)
    _check_lost(world, which, seen, decision)
    _check_edits(seen, decision)
    _check_limits(world, seen, decision)
    _check_wake(world, seen, decision)


def check_applied(world: World, decision: Decision) -> None:
    """Check what a decision did when it was carried out."""
    for role in world.wanted:
        _check_reversal(world, role)
    again = world.copy()
    if apply(again, decision):
        raise Violation(f"carried out twice, this changes the fleet twice: {decision.line}")


def _leaving(decision: Decision) -> list[Drain | Flip]:
    return [action for action in decision.actions if isinstance(action, Drain | Flip)]


def _check_wanted(seen: Report, decision: Decision) -> None:
    """Actions and totals of a decision agree."""
    wanted = {role: each.wanted for role, each in seen.roles.items()}
    for action in decision.actions:
        if isinstance(action, Flip):
            wanted[action.role] -= 1
            wanted[action.to] += 1
        elif isinstance(action, Add):
            if action.count <= wanted[action.role]:
                raise Violation("a role is to grow to fewer workers than it has")
            wanted[action.role] = action.count
        elif isinstance(action, Drain):
            if action.count != wanted[action.role] - 1:
                raise Violation("a drain takes more or fewer than one worker")
            wanted[action.role] = action.count
    if wanted != dict(decision.wanted):
        raise Violation(f"the actions lead to {wanted}, the decision says {decision.wanted}")
    if any(isinstance(action, Hold) for action in decision.actions) and len(decision.actions) > 1:
        raise Violation("it holds and acts at the same time")
    for role, each in seen.roles.items():
        kinds = {type(action) for action in decision.actions if getattr(action, "role", "") == role}
        # Workers may replace those that a role lends to another one.
        if Add in kinds and (Drain in kinds or wanted[role] < each.wanted):
            raise Violation(f"{role} grows and shrinks in one decision")


def _check_pauses(seen: Report, decision: Decision) -> None:
    """A role does not shrink while workers of it drain, unless their drain does not end."""
    for action in _leaving(decision):
        for each in seen.workers:
            recent = each.state_seconds < 3 * seen.roles[each.role].drain_seconds
            if each.role == action.role and each.state == "draining" and recent:
                raise Violation(f"{each.worker} still drains: {decision.line}")


def _check_streams(world: World, seen: Report, decision: Decision) -> None:
    """No action ends a stream: requests of a worker that leaves fit on those that stay. A role of which workers are
    wanted keeps one that serves."""
    for role in seen.roles:
        leaving = {action.worker for action in _leaving(decision) if action.role == role}
        workers = [each for each in seen.workers if each.role == role and each.state == "ready"]
        gone = [each for each in workers if each.worker in leaving]
        stay = [each for each in workers if each.worker not in leaving]
        if gone and not any(each.age <= world.setup.objectives.stale_seconds for each in stay):
            if decision.wanted[role] > 0:
                raise Violation(f"the last ready {role} worker leaves before another one serves: {decision.line}")
            requests = sum(each.waiting + each.arrivals for each in seen.traffic.values())
            if (requests and role != "encode") or any(each.running or each.queued_tokens for each in gone):
                raise Violation(f"the last {role} workers leave while there are requests: {decision.line}")
        if role == "decode":
            room = sum(each.max_seqs - each.running for each in stay)
            if gone and sum(each.running for each in gone) > room:
                raise Violation(f"requests of workers that leave find no room: {decision.line}")


def _check_lost(world: World, which: int, seen: Report, decision: Decision) -> None:
    """Lost or stale reports hold the fleet, never shrink it, and it must have been watched for a while after them."""
    if not _leaving(decision):
        return
    stale = world.setup.objectives.stale_seconds
    if seen.traffic_age > stale or seen.gateways_lost or any(each.age > stale for each in seen.workers):
        raise Violation(f"the fleet shrinks on a report with something missing: {decision.line}")
    free = [action for action in _leaving(decision) if seen.roles[action.role].pinned is None]
    if free and (world.tick - world.complete_since[which]) * TICK < SETTLE:
        raise Violation(f"the fleet shrinks soon after reports were lost: {decision.line}")


def _check_edits(seen: Report, decision: Decision) -> None:
    """What a person has set wins."""
    for role, each in seen.roles.items():
        if each.pinned is not None and abs(decision.wanted[role] - each.pinned) > abs(each.wanted - each.pinned):
            raise Violation(f"a person wants {each.pinned} {role} workers: {decision.line}")
        if each.pinned is not None and any(
            isinstance(action, Flip) and role in (action.role, action.to) for action in decision.actions
        ):
            raise Violation(f"a flip changes the {role} workers that a person has set: {decision.line}")


def _check_limits(world: World, seen: Report, decision: Decision) -> None:
    """The budget is kept, and the least and the most of each role."""
    objectives = world.setup.objectives
    wanted = {role: each.wanted for role, each in seen.roles.items()}
    for role, count in decision.wanted.items():
        least, most = objectives.limits(role).least, world.setup.most(role, wanted[role])
        is_free = seen.roles[role].pinned is None and count != wanted[role]
        if is_free and not min(least, wanted[role]) <= count <= max(most, wanted[role]):
            raise Violation(f"{role} must have {least} to {most} workers: {decision.line}")
    if objectives.budget is None:
        return
    used = sum(count * objectives.limits(role).devices for role, count in decision.wanted.items())
    used += sum(objectives.limits(each.role).devices for each in seen.workers if each.state == "draining")
    drains = [action for action in decision.actions if isinstance(action, Drain)]
    used += sum(objectives.limits(action.role).devices for action in drains)
    grows = any(isinstance(action, Add) for action in decision.actions)
    if used > objectives.budget and grows:
        raise Violation(f"{used} devices are more than the budget: {decision.line}")


def _check_wake(world: World, seen: Report, decision: Decision) -> None:
    """Requests that wait while there is no worker of the first role wake the fleet at once."""
    role = seen.first_role
    first = seen.roles[role]
    fresh = seen.traffic_age <= world.setup.objectives.stale_seconds
    waiting = sum(each.waiting for each in seen.traffic.values())
    newest = "not newer" not in decision.line
    limits, budget = world.setup.objectives.limits(role), world.setup.objectives.budget
    used = sum(each.wanted * world.setup.objectives.limits(role).devices for role, each in seen.roles.items())
    used += sum(each.state == "draining" for each in seen.workers)
    if first.pinned is not None or not limits.most or (budget is not None and used + limits.devices > budget):
        return
    if waiting and fresh and newest and not first.wanted and not decision.wanted[role]:
        raise Violation(f"{waiting} requests wait, and nobody is woken: {decision.line}")


def _check_reversal(world: World, role: Role) -> None:
    """Under constant load, no change is reversed within startup plus drain time.

    The load was constant if it did not change in the time that a planner measures before the first change. A fleet that
    has shrunk to zero grows for the first request, whose time nobody knows.
    """
    changes = world.changes.get(role, ())
    if len(changes) < 2:
        return
    first, second = changes[-2:]
    soon = (second.tick - first.tick) * TICK < SETTLE
    is_constant = world.load_since + MEASURED_TICKS < first.tick
    wakes = second.grows and world.wanted[role] == 1
    if first.grows != second.grows and soon and is_constant and not wakes:
        raise Violation(f"{role} goes back after {(second.tick - first.tick) * TICK:.0f} s under constant load")


def check_fits(world: World) -> None:
    """Check that the planner knows how long steps take, although the first steps of every worker are slow."""
    truth = {
        "prefill": (CHUNK, CHUNK, CHUNK_SECONDS),
        "pool": (CHUNK, 0, CHUNK_SECONDS),
        "encode": (ENCODED, ENCODED, ENCODE_SECONDS),
    }
    for role, (tokens, context, seconds) in truth.items():
        times = world.planners[0].role(role).times  # type: ignore[arg-type]
        if times is not None and not 0.8 < times.seconds(tokens, context) / seconds < 1.25:
            raise Violation(
                f"the planner believes that a step takes {times.seconds(tokens, context):.2f} s, not {seconds}"
            )
    times = world.planners[0].role("decode").times
    if times is not None:
        running = times.observed_tokens
        believed = times.seconds(running, 300 * running)
        if not 0.6 < believed / step_seconds(running) < 1.5:
            raise Violation(f"the planner believes that a step of {running:.0f} takes {believed:.3f} s")


def check_rest(world: World, lines: list[str]) -> None:
    """Check a world in which nothing has gone wrong for long: the fleet fits its load, and has come to rest."""
    check_fits(world)
    served = not world.pinned and all(each.left < 1000 for each in world.workers)
    # While a change must not be reversed, a line says only that, and hides that there are too few devices.
    recent = "; ".join(lines[-int(SETTLE / TICK) - 1 :])
    served &= not any(words in recent for words in ("has devices for", "budget has no room", "have no room for"))
    # A backlog may outlast the run if there are as many decode workers as may be, and all their places are taken.
    decode = len(world.of("decode"))
    if "decode" in world.wanted:
        served &= decode < world.setup.most("decode", world.wanted["decode"]) or world.streams < world.places
    served &= not world.setup.shares_memory or world.streams < SHARED_SEQS
    if any(world.waiting.values()) and served:
        raise Violation(f"requests still wait: {world.waiting}, {lines[-1]}")
    if not sum(world.load.values()) and not any(world.waiting.values()):
        for role, count in world.wanted.items():
            least = world.setup.objectives.limits(role).least
            if role not in world.pinned and count > least:
                raise Violation(f"without requests there are still {count} {role} workers: {lines[-1]}")
    for role, pin in world.pinned.items():
        if world.wanted[role] != pin:
            raise Violation(f"a person wants {pin} {role} workers, there are {world.wanted[role]}")
    for role, changes in world.changes.items():
        recent = [change.grows for change in changes if change.tick > world.tick - 25]
        if sum(first != second for first, second in itertools.pairwise(recent)) > 4:
            raise Violation(f"{role} goes up and down for ever: {changes}")
