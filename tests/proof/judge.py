"""What must hold in every world."""

from __future__ import annotations

from collections import defaultdict

from paceline.core.kv_layout import NO_SLOT
from paceline.services.kvtransfer.hold import NOBODY, Hold, State
from tests.proof.world import Job, Op, Violation, World


def without(table: tuple[int, ...], kept: int) -> tuple[int, ...]:
    """The table of a job that has given back the blocks before `kept`."""
    return (NO_SLOT,) * min(kept, len(table)) + table[kept:]


def check(world: World) -> None:
    """Raises Violation unless the ledger proves, every block that somebody may touch is that one's, and every block
    that others may find contains what its name says."""
    if wrong := world.ledger.check():
        raise Violation("; ".join(wrong))
    holders: dict[int, list[Hold]] = defaultdict(list)
    for hold in world.ledger.holds():
        for slot in hold.slots():
            holders[slot].append(hold)
    for job in (*world.jobs.values(), *world.ghosts):
        if job.touches:
            _check_touched(world, job, holders)
    for slot, name in enumerate(world.ledger._pool._names):
        if name is not None and world.memory[slot] != name:
            raise Violation(f"block {slot} is published as {name} and contains {world.memory[slot]}")


def _check_touched(world: World, job: Job, holders: dict[int, list[Hold]]) -> None:
    """A step of this job may be reading its blocks and writing to those that are not settled, at this moment."""
    for group, block, slot in world.blocks(job):
        own = [hold for hold in holders[slot] if hold.key == job.key]
        if not own:
            raise Violation(
                f"{job.role} worker {job.session} touches block {slot} of {job.key}, which is not held for it"
            )
        if not world.may_write(job, group, block):
            continue
        if own[0].writer != job.session or len(holders[slot]) > 1:
            raise Violation(f"{job.role} worker {job.session} writes to block {slot} of {job.key}, as others may")


def check_content(world: World, job: Job) -> None:
    """What was adopted is exactly what the prefill of this very attempt wrote, or what was published under its hash."""
    context = world.request(job.request).context
    for group, block, slot in world.blocks(job):
        computed = block * world.setup.layout.groups[group].block_tokens < context
        if computed and world.memory[slot] != world.word(job, group, block):
            raise Violation(f"block {slot} of {job.key} contains {world.memory[slot]}")


def right_to(world: World, op: Op) -> bool:
    """Whether the sender may do this: only with the newest generation, and to what is its own to change."""
    if op.kind in ("reserve", "release"):
        return True
    hold = next((hold for hold in world.ledger.holds() if hold.key[:2] == op.key[:2] and lives(hold)), None)
    if hold is None or hold.key.generation != op.key.generation:
        return False
    if op.kind in ("open", "adopt"):
        return hold.state is (State.RESERVED if op.kind == "open" else State.FILLED)
    return hold.writer == op.session


def lives(hold: Hold) -> bool:
    return hold.state is not State.DRAINING


def standing(world: World) -> object:
    """All that an operation may change, but for deadlines."""
    holds = [(hold.key, hold.state, hold.owner, hold.writer, str(hold.tables)) for hold in world.ledger.holds()]
    return holds, world.ledger.counts()


def check_leases(world: World, renewed: set[tuple[str, int]]) -> None:
    """A lease has gone by: no hold lives that nobody has renewed."""
    for hold in world.ledger.holds():
        if lives(hold) and hold.key[:2] not in renewed:
            raise Violation(f"hold {hold.key} outlives its lease")


def check_quiet(world: World) -> None:
    """Nothing can happen any more: every request has come to its end, and every block has come back."""
    counts = world.ledger.counts()
    unended = [index for index, asked in enumerate(world.asked) if asked.phase not in ("done", "failed")]
    if unended:
        raise Violation(f"requests {unended} never end: {[world.asked[index].phase for index in unended]}")
    if world.jobs or world.ledger.holds() or counts.free + counts.cached != counts.total:
        holds = [f"{hold.key} {hold.state.value} writer {hold.writer or NOBODY}" for hold in world.ledger.holds()]
        raise Violation(f"blocks never come back: {counts}, holds {holds}, jobs {list(world.jobs)}")
