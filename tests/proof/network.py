"""Moves of operations between workers and the ledger, of time, and of kvtransfer's end."""

from __future__ import annotations

from paceline.core.errors import BusyError, PacelineError, UnavailableError
from paceline.services.kvtransfer.ledger.lease import State
from paceline.services.kvtransfer.ledger.lease_book import GRACE_SECONDS
from tests.proof import judge, transfer, worker
from tests.proof.calls import carry_out
from tests.proof.parties import Job, JobId, Late, Op
from tests.proof.world import LEASE, Host, Violation, World, make_host, make_ledger


def deliver(world: World, session: int) -> None:
    """Carry out an operation and answer it."""
    op = _take(world, session)
    worker.answered(world, op, carry_out(world, op))


def lose(world: World, session: int) -> None:
    """Lose an operation: it never arrives, and its sender gets no answer."""
    worker.answered(world, _take(world, session), UnavailableError("lost"))


def lose_answer(world: World, session: int) -> None:
    op = _take(world, session)
    carry_out(world, op)
    worker.answered(world, op, UnavailableError("unanswered"))


def delay(world: World, session: int) -> None:
    """Delay an operation: its sender gives it up, and it arrives later, after operations that are sent now."""
    op = _take(world, session)
    world.send_late(op, again=False)
    worker.answered(world, op, UnavailableError("late"))


def duplicate(world: World, session: int) -> None:
    """Carry out an operation and answer it. It will arrive a second time."""
    op = _take(world, session)
    answer = carry_out(world, op)
    world.send_late(op, again=not (op.kind == "extend" and isinstance(answer, BusyError)))
    worker.answered(world, op, answer)


def arrive(world: World, late: Late) -> None:
    """Let a late or repeated operation arrive. Nobody waits for its answer."""
    index = world.late.index(late)
    world.late = world.late[:index] + world.late[index + 1 :]
    ledger = world.hosts[late.op.host].ledger
    before = judge.standing(ledger, world.now) if late.again else None
    carry_out(world, late.op)
    if late.again and judge.standing(ledger, world.now) != before:
        raise Violation(f"{late.op} came a second time and had an effect")


def _take(world: World, session: int) -> Op:
    op, *others = world.queues[session]
    if others:
        world.queues[session] = tuple(others)
    else:
        del world.queues[session]
    return op


def may_adopt(world: World, job: Job) -> bool:
    """Return whether a decode worker that waits for its blocks gets an answer: they are filled, or it has lost them."""
    host = world.hosts[job.host]
    leases = [lease for lease in host.ledger.leases() if lease.key[:2] == job.key[:2] and judge.lives(lease, world.now)]
    return not host.away and (not leases or leases[0].state is State.FILLED)


def adopt(world: World, job_id: JobId) -> None:
    """Carry out a decode worker's call to adopt, which waits independently of other operations. Its answer is sent."""
    job = world.jobs[job_id]
    worker.given(world, job, carry_out(world, Op("adopt", job.host, job.session, job.key)))


# ---- sessions and time


def notice(world: World, session: int) -> None:
    """Let the ledger notice that a session has ended. Operations of this session that are on their way become void."""
    world.unnoticed = tuple(each for each in world.unnoticed if each != session)
    world.late = tuple(late for late in world.late if late.op.session != session)
    world.hosts[world.host_of(session)].ledger.lose_session(session, world.now)


def pass_time(world: World, deaf: int = 0) -> None:
    """Let the time of a lease pass. All sessions renew their leases, except for `deaf`, whose renewals are lost.

    The ledger notices that a lease is over when it sweeps or when an operation names the lease. A ghost whose session
    is known to have ended is gone after the grace period.
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
    """Sweep the ledger for leases that are over (services/kvtransfer/keeper.py)."""
    world.hosts[host].ledger.expire(world.now)
    judge.check_swept(world, host)


def _renew(world: World, job: Job, now: float) -> bool:
    try:
        world.hosts[job.host].ledger.renew(job.session, job.key, now)
    except PacelineError:
        return False
    return True


def cut(world: World, name: tuple[str, int]) -> None:
    """Break the stream between two hosts. Each side learns of this later."""
    world.transfers[name] = world.transfers[name]._replace(cut=True)


# ---- kvtransfer ends, and another one begins


def crash_ledger(world: World, host: int) -> None:
    """Kill kvtransfer. Its arena and its workers stay, and its successor answers the operations that were sent. All its
    transfers, as a reader and as a source, are over."""
    world.hosts[host].claims = {}
    world.late = tuple(late for late in world.late if late.op.host != host)
    _end_transfers(world, host)


def reconcile(world: World, host: int) -> None:
    """Start the successor of kvtransfer with the claims of the workers. Workers without claims are gone by now."""
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
    """Return whether the time for workers to come back may be over: all living workers have come back."""
    claims = world.hosts[host].claims
    return claims is not None and all(job.session in claims for job in world.jobs.values() if job.host == host)


def restart_ledger(world: World, host: int) -> None:
    """End kvtransfer in a way that its arena cannot be kept. All sessions and workers of the host end too. Their late
    writes go to a file that nobody maps."""
    world.hosts[host] = make_host(world.setup)
    world.queues = {session: queue for session, queue in world.queues.items() if world.host_of(session) != host}
    world.jobs = {name: job for name, job in world.jobs.items() if job.host != host}
    world.late = tuple(late for late in world.late if late.op.host != host)
    world.ghosts = tuple(job for job in world.ghosts if job.host != host)
    world.unnoticed = tuple(session for session in world.unnoticed if world.host_of(session) != host)
    world.sessions = [world.next_session(each) if world.host_of(each) == host else each for each in world.sessions]
    _end_transfers(world, host)


def _end_transfers(world: World, host: int) -> None:
    """End all transfers of a host. Named blocks can still be read, and only the digests show that they have changed."""
    for each in list(world.transfers.values()):
        reader = {"reader": "gone", "stream": ()} if each.here == host else {}
        source = {"source": "gone"} if each.there == host else {}
        transfer.put(world, each, **reader, **source)
