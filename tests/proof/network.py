"""Operations between workers and the ledger: what can become of them, and what time does."""

from __future__ import annotations

from paceline.core.errors import BusyError, PacelineError, UnavailableError
from paceline.services.kvtransfer.lease import State
from paceline.services.kvtransfer.lease_book import GRACE_SECONDS
from tests.proof import judge, transfer, worker
from tests.proof.calls import carry_out
from tests.proof.parties import Job, JobId, Late, Op
from tests.proof.world import LEASE, Host, Violation, World, make_host, make_ledger


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
    ledger = world.hosts[late.op.host].ledger
    before = judge.standing(ledger, world.now) if late.again else None
    carry_out(world, late.op)
    if late.again and judge.standing(ledger, world.now) != before:
        raise Violation(f"{late.op} came again and was not without effect")


def _take(world: World, session: int) -> Op:
    op, *others = world.queues[session]
    if others:
        world.queues[session] = tuple(others)
    else:
        del world.queues[session]
    return op


def may_adopt(world: World, job: Job) -> bool:
    """Whether a decode worker that waits for its blocks gets an answer: they are filled, or it has lost them."""
    host = world.hosts[job.host]
    leases = [lease for lease in host.ledger.leases() if lease.key[:2] == job.key[:2] and judge.lives(lease, world.now)]
    return not host.away and (not leases or leases[0].state is State.FILLED)


def adopt(world: World, job_id: JobId) -> None:
    """Its call, which waits beside all other operations, is carried out; the answer is on its way."""
    job = world.jobs[job_id]
    worker.given(world, job, carry_out(world, Op("adopt", job.host, job.session, job.key)))


# ---- sessions and time


def notice(world: World, session: int) -> None:
    """The ledger learns that a session has ended; nothing that is still on its way counts any more."""
    world.unnoticed = tuple(each for each in world.unnoticed if each != session)
    world.late = tuple(late for late in world.late if late.op.session != session)
    world.hosts[world.host_of(session)].ledger.lose_session(session, world.now)


def pass_time(world: World, deaf: int = 0) -> None:
    """A lease goes by. All renew what they know of, but for the session to which its ledger is deaf. What is over then
    the ledger finds when it sweeps, or when somebody names it, whichever comes first.

    A ghost whose session is known to have ended is gone when the grace is over.
    """
    world.ghosts = tuple(job for job in world.ghosts if job.session in world.unnoticed)
    renewed = set()
    for third in (1, 2, 3):
        instant = world.now + third * LEASE / 4
        for job in world.jobs.values():
            if job.renews and job.session != deaf and _renew(world, job, instant):
                renewed.add((job.host, *job.key[:2]))
        for exported in list(world.transfers.values()):
            if exported.source == "exporting" and transfer.keep(world, exported, instant):
                renewed.add((exported.there, *exported.id))
    world.now += max(LEASE, GRACE_SECONDS)
    judge.check_leases(world, renewed)
    judge.check_exported(world)


def sweep(world: World, host: int) -> None:
    """The ledger looks for what is over (services/kvtransfer/keeper.py)."""
    world.hosts[host].ledger.expire(world.now)
    judge.check_swept(world, host)


def _renew(world: World, job: Job, now: float) -> bool:
    try:
        world.hosts[job.host].ledger.renew(job.session, job.key, now)
    except PacelineError:
        return False
    return True


def cut(world: World, name: tuple[str, int]) -> None:
    """The stream between two hosts breaks, of which each side will learn."""
    world.transfers[name] = world.transfers[name]._replace(cut=True)


# ---- kvtransfer ends, and another one begins


def crash_ledger(world: World, host: int) -> None:
    """kvtransfer is killed. Its arena stays, and so do its workers; what they had sent is answered by its successor.
    What it read, or others from it, is over."""
    world.hosts[host].claims = {}
    world.late = tuple(late for late in world.late if late.op.host != host)
    _end_transfers(world, host)


def reconcile(world: World, host: int) -> None:
    """Its successor goes on with what workers have claimed. Who has not is gone by now."""
    claimants = world.hosts[host].claims
    assert claimants is not None
    ledger = make_ledger(world.setup)
    ledger.restore([claim for claims in claimants.values() for claim in claims], world.now)
    world.hosts[host] = Host(ledger, world.hosts[host].memory)

    def stays(session: int) -> bool:
        return world.host_of(session) != host or session in claimants

    world.ghosts = tuple(job for job in world.ghosts if stays(job.session))
    world.unnoticed = tuple(session for session in world.unnoticed if stays(session))
    world.late = tuple(late for late in world.late if late.op.host != host)  # sent to nobody


def may_reconcile(world: World, host: int) -> bool:
    """Whether the time in which workers come back may be over: those that live have all done so."""
    claims = world.hosts[host].claims
    return claims is not None and all(job.session in claims for job in world.jobs.values() if job.host == host)


def restart_ledger(world: World, host: int) -> None:
    """kvtransfer ends, and its arena cannot be kept: so do all sessions, and their workers. What they still write goes
    to a file that nobody maps."""
    world.hosts[host] = make_host(world.setup)
    world.queues = {session: queue for session, queue in world.queues.items() if world.host_of(session) != host}
    world.jobs = {name: job for name, job in world.jobs.items() if job.host != host}
    world.late = tuple(late for late in world.late if late.op.host != host)
    world.ghosts = tuple(job for job in world.ghosts if job.host != host)
    world.unnoticed = tuple(session for session in world.unnoticed if world.host_of(session) != host)
    world.sessions = [world.next_session(each) if world.host_of(each) == host else each for each in world.sessions]
    _end_transfers(world, host)


def _end_transfers(world: World, host: int) -> None:
    """What has been named can still be read: nothing but the digests tells that it may be gone."""
    for each in list(world.transfers.values()):
        reader = {"reader": "gone", "stream": ()} if each.here == host else {}
        source = {"source": "gone"} if each.there == host else {}
        transfer.put(world, each, **reader, **source)
