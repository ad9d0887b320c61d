"""Operations between workers and the ledger: what can become of them, and what time does."""

from __future__ import annotations

from paceline.core.errors import BusyError, PacelineError, UnavailableError
from paceline.services.kvtransfer.hold_book import GRACE_SECONDS
from paceline.services.kvtransfer.ledger import Ledger
from tests.proof import judge, worker
from tests.proof.world import LEASE, Key, Late, Op, World


def deliver(world: World, session: int) -> None:
    """The operation is carried out, and its answer comes."""
    op = _take(world, session)
    worker.answered(world, op, carry_out(world, op))


def lose(world: World, session: int) -> None:
    """The operation never comes, and no answer."""
    worker.answered(world, _take(world, session), UnavailableError("lost"))


def lose_answer(world: World, session: int) -> None:
    op = _take(world, session)
    carry_out(world, op)
    worker.answered(world, op, UnavailableError("unanswered"))


def delay(world: World, session: int) -> None:
    """The sender gives the operation up, and it will come after all, behind what is sent now."""
    op = _take(world, session)
    world.send_late(op, again=False)
    worker.answered(world, op, UnavailableError("late"))


def duplicate(world: World, session: int) -> None:
    """The operation is carried out and answered, and will come again."""
    op = _take(world, session)
    answer = carry_out(world, op)
    world.send_late(op, again=not (op.kind == "extend" and isinstance(answer, BusyError)))
    worker.answered(world, op, answer)


def arrive(world: World, late: Late) -> None:
    """A late or repeated operation comes; nobody waits for its answer."""
    index = world.late.index(late)
    world.late = world.late[:index] + world.late[index + 1 :]
    before = judge.standing(world) if late.again else None
    carry_out(world, late.op)
    if late.again and judge.standing(world) != before:
        raise judge.Violation(f"{late.op} came again and was not without effect")


def _take(world: World, session: int) -> Op:
    op, *others = world.queues[session]
    if others:
        world.queues[session] = tuple(others)
    else:
        del world.queues[session]
    return op


def carry_out(world: World, op: Op) -> worker.Answer:
    """Calls the ledger; the answer is a copy of the hold as it is now, or the error."""
    allowed = judge.right_to(world, op)
    try:
        answer = _call(world, world.ledger, op)
    except PacelineError as error:
        return error
    if not allowed:
        raise judge.Violation(f"{op} was carried out, and its sender had no right to it")
    return answer


def _call(world: World, ledger: Ledger, op: Op) -> worker.Answer:
    request = world.request(int(op.key.request_id.split(".")[0]))
    session, key, now = op.session, op.key, world.now
    match op.kind:
        case "reserve":
            tokens = request.context + (request.growth if key.generation > 1 else 0)
            return ledger.reserve(session, key, request.hashes, tokens, max(0, request.context - 1), now)
        case "open":
            return ledger.open(session, key, now)
        case "fill":
            return ledger.fill(session, key, request.context, now)
        case "adopt":
            return ledger.adopt(session, key, now)
        case "extend":
            return ledger.extend(session, key, request.context + request.growth, now)
        case "seal":
            for index, group in enumerate(world.setup.layout.groups):
                ends = request.hashes[group.block_tokens // 16 - 1 :: group.block_tokens // 16]
                first = op.published // group.block_tokens
                ledger.seal(session, key, index, first, ends[first:], now)
        case "trim":
            for index, group in enumerate(world.setup.layout.groups):
                if group.shape.window:
                    ledger.trim(session, key, index, group.first_needed_block(request.context), now)
        case "release":
            ledger.release(session, key, now)
    return None


# ---- sessions and time


def notice(world: World, session: int) -> None:
    """The ledger learns that a session has ended; nothing that is still on its way counts any more."""
    world.unnoticed = tuple(each for each in world.unnoticed if each != session)
    world.late = tuple(late for late in world.late if late.op.session != session)
    world.ledger.lose_session(session, world.now)


def pass_time(world: World, deaf: int = 0) -> None:
    """A lease goes by. All renew what they know of, but for the session to which the ledger is deaf.

    A ghost whose session is known to have ended is gone when the grace is over.
    """
    world.ghosts = tuple(job for job in world.ghosts if job.session in world.unnoticed)
    renewed = set()
    for third in (1, 2, 3):
        instant = world.now + third * LEASE / 4
        for job in world.jobs.values():
            if job.renews and job.session != deaf and _renew(world, job.session, job.key, instant):
                renewed.add(job.key[:2])
    world.now += max(LEASE, GRACE_SECONDS)
    world.ledger.expire(world.now)
    judge.check_leases(world, renewed)


def _renew(world: World, session: int, key: Key, now: float) -> bool:
    try:
        world.ledger.renew(session, key, now)
    except PacelineError:
        return False
    return True


def crash_ledger(world: World) -> None:
    """kvtransfer is killed. Its arena stays, and so do its workers; what they had sent is answered by its successor."""
    world.claims = {}
    world.late = ()


def reconcile(world: World) -> None:
    """Its successor goes on with what workers have claimed. Who has not is gone by now."""
    assert world.claims is not None
    claimants, world.claims = world.claims, None
    ledger = Ledger(world.setup.layout, world.setup.slots, LEASE)
    ledger.restore([claim for claims in claimants.values() for claim in claims], world.now)
    world.ledger = ledger
    world.ghosts = tuple(job for job in world.ghosts if job.session in claimants)
    world.unnoticed = tuple(session for session in world.unnoticed if session in claimants)
    world.late = ()  # sent to nobody


def may_reconcile(world: World) -> bool:
    """Whether the time in which workers come back may be over: those that live have all done so."""
    return world.claims is not None and all(job.session in world.claims for job in world.jobs.values())


def restart_ledger(world: World) -> None:
    """kvtransfer ends, and its arena cannot be kept: so do all sessions, and their workers. What they still write goes
    to a file that nobody maps."""
    world.claims = None
    world.ledger = Ledger(world.setup.layout, world.setup.slots, LEASE)
    first = max(world.sessions) + 1
    world.sessions = list(range(first, first + len(world.sessions)))
    world.memory = [None] * world.setup.slots
    world.queues, world.jobs, world.late, world.ghosts, world.unnoticed = {}, {}, (), (), ()
