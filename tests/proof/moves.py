"""All moves that can happen to a world next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import prefix_key
from tests.proof import claims, encodings, gateway, judge, network, transfer, transfer_moves, worker
from tests.proof.parties import DECODE, ENCODE, Job
from tests.proof.world import Violation, World, is_encoding


class Move(NamedTuple):
    """One event. Applying it to equal worlds gives equal worlds."""

    act: Callable[..., None]
    args: tuple[object, ...]

    def apply(self, world: World) -> None:
        self.act(world, *self.args)

    def describe(self, world: World) -> str:
        """Return one line of a trace. `world` is the world before the move."""
        shown = ", ".join(_show(world, arg) for arg in self.args)
        return f"{self.act.__module__.rsplit('.')[-1]:9}{self.act.__name__}({shown})"


def _show(world: World, arg: object) -> str:
    match arg:
        case Job():
            return f"{arg.role} session {arg.session}, {arg.key}"
        case (str(role), str(request), int(attempt)):
            return f"{role}, {request}/{attempt}"
    queue = world.queues.get(arg, ()) if isinstance(arg, int) else ()
    return f"{arg}: {queue[0].kind} {queue[0].key}" if queue and arg in world.queues else str(arg)


def step(world: World, move: Move) -> None:
    """Apply a move and check the world. Raises Violation, even if the code itself raises another error."""
    try:
        move.apply(world)
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}") from error
    for host in world.hosts:
        host.ledger.take_events()
        host.ledger.take_overdue()
    judge.check(world)


def progress(world: World) -> Iterator[Move]:
    """Yield moves that happen sooner or later if nothing goes wrong, except for the passing of time."""
    yield from _of_network(world)
    for number, host in enumerate(world.hosts):
        if host.away:
            yield from _of_return(world, number)
    for brought in world.transfers.values():
        for act in transfer_moves.progress(world, brought):
            yield Move(act, (brought.id,))
    for job in world.jobs.values():
        yield from _of_job(world, job)
    for index in range(len(world.asked)):
        yield from _of_gateway(world, index)


def _of_network(world: World) -> Iterator[Move]:
    for late in dict.fromkeys(world.late):
        yield Move(network.arrive, (late,))
    for session in world.queues:
        if not _away(world, session):
            yield Move(network.deliver, (session,))
    for session in world.unnoticed:
        if not _away(world, session):
            yield Move(network.notice, (session,))
    for number, host in enumerate(world.hosts):
        if not host.away and any(lease.deadline <= world.now for lease in host.ledger.leases()):
            yield Move(network.sweep, (number,))


def _away(world: World, session: int) -> bool:
    return world.hosts[world.host_of(session)].away


def _of_return(world: World, host: int) -> Iterator[Move]:
    """Yield moves while kvtransfer is away, in which its workers come back to its successor."""
    for session in sorted({job.session for job in world.jobs.values() if job.host == host}):
        if session not in (world.hosts[host].claims or ()):
            yield Move(claims.come_back, (session,))
    if network.may_reconcile(world, host):
        yield Move(network.reconcile, (host,))


def _of_job(world: World, job: Job) -> Iterator[Move]:
    if job.encoding:
        yield from _of_encoding(world, job)
        return
    if job.renews and not world.hosts[job.host].away and _is_lost(world, job):
        yield Move(worker.learn_of_loss, (job.id,))
    if job.fetch == "called" and not _is_read_for(world, job, job.key):
        yield Move(worker.fetch_failed, (job.id,))
    if job.phase == "fetching prefix" and not _is_read_for(world, job, prefix_key(job.key)):
        yield Move(worker.leave_prefix, (job.id,))
    if not world.is_current(job) and not job.cancelled and job.phase != "stopping":
        yield Move(worker.cancel, (job.id,))
    if job.phase == "admitted" and network.may_adopt(world, job):
        yield Move(network.adopt, (job.id,))
    if job.phase in _NEXT and not encodings.waits_for_rows(world, job):
        yield Move(_NEXT[job.phase], (job.id,))
    if job.phase == "waiting" and world.room_for(job.request, grown=True, host=job.host):
        yield Move(worker.reserve_again, (job.id,))


def _of_encoding(world: World, job: Job) -> Iterator[Move]:
    """Yield moves of a job with an encoding. Nobody is told if its lease ends early: the job releases it later."""
    if job.role == ENCODE and not gateway.needs_encoding(world, job):
        if job.phase == "holding":
            yield Move(encodings.end, (job.id,))
        elif not job.cancelled and job.phase != "stopping":
            yield Move(worker.cancel, (job.id,))
    if job.phase == "writing":
        yield Move(encodings.encode, (job.id,))
    elif job.phase == "stopping":
        yield Move(worker.removed, (job.id,))


_NEXT = {
    "writing": worker.compute,
    "running": worker.generate,
    "stopping": worker.removed,
    "adopting": worker.hear,
}


def _is_lost(world: World, job: Job) -> bool:
    """Return whether the ledger would refuse a renewal, because the lease has ended."""
    leases = world.hosts[job.host].ledger.leases()
    return not any(lease.key[:2] == job.key[:2] and judge.lives(lease, world.now) for lease in leases)


def _is_read_for(world: World, job: Job, key: Key) -> bool:
    """Return whether a reader has this job's call."""
    brought = world.transfers.get(key[:2])
    return brought is not None and brought.reader != "gone"


def _of_gateway(world: World, index: int) -> Iterator[Move]:
    phase = world.asked[index].phase
    if phase == "waiting":
        yield from _starts(world, index)
    elif phase in ("admitting", "prefilling", "decoding"):
        if gateway.is_admitted(world, index):
            alone = world.asked[index].prefiller == gateway.NOBODY
            yield Move(gateway.prefill_here if alone else gateway.call_prefill, (index,))
        if gateway.may_call_encode(world, index):
            yield from _encoders(world, index)
        if gateway.may_tell_ready(world, index):
            yield Move(gateway.tell_ready, (index,))
        if gateway.may_call_fetch(world, index):
            yield Move(gateway.call_fetch, (index,))
        if gateway.may_hand_over(world, index):
            yield Move(gateway.hand_over, (index,))
        if gateway.sees_failure(world, index):
            yield Move(gateway.fail, (index,))


def _starts(world: World, index: int) -> Iterator[Move]:
    """Yield starts of an attempt on any two workers with room for it. A decode worker with preempted requests takes no
    others."""
    setup = world.setup
    rooms = [world.room_for(index, grown=False, host=host) for host in range(setup.hosts)]
    closed = {job.session for job in world.jobs.values() if job.role == DECODE and job.alone}
    for decoder in range(setup.decoders):
        if rooms[setup.place(decoder)] and world.sessions[decoder] not in closed:
            if not setup.prefillers:
                yield Move(gateway.start, (index, decoder, gateway.NOBODY))
            for prefiller in range(setup.decoders, setup.decoders + setup.prefillers):
                if rooms[setup.place(prefiller)]:
                    yield Move(gateway.start, (index, decoder, prefiller))


def _encoders(world: World, index: int) -> Iterator[Move]:
    """Yield calls of each worker that may compute the request's encoding."""
    setup = world.setup
    for encoder in range(setup.decoders, setup.decoders + setup.prefillers):
        if setup.place(encoder) == setup.place(world.asked[index].prefiller):
            yield Move(gateway.call_encode, (index, encoder))


def at_any_time(world: World) -> Iterator[Move]:
    """Yield moves that may happen at any time and any number of times without a fault."""
    if not any(host.away for host in world.hosts):
        yield Move(network.pass_time, ())
    for job in (*world.jobs.values(), *world.ghosts):
        if job.phase == "stopping" or job in world.ghosts:
            yield Move(worker.scribble, (job,))


def faults(world: World) -> Iterator[Move]:
    """Yield all possible faults. The caller counts them."""
    yield from _faults_of_messages(world)
    yield from _faults_of_transfers(world)
    for job in world.jobs.values():
        if job.phase in ("admitted", "adopting") and not world.hosts[job.host].away:
            yield Move(worker.adopt_never, (job.id,))
    used = {job.host for job in world.jobs.values()} | {job.there for job in world.transfers.values()}
    for host in sorted(used):
        if not world.hosts[host].away:
            yield Move(network.crash_ledger, (host,))
        yield Move(network.restart_ledger, (host,))
    for index, asked in enumerate(world.asked):
        if asked.runs:
            yield Move(gateway.fail, (index,))
        if world.request(index).text and asked.prefiller != gateway.NOBODY and gateway.is_admitted(world, index):
            yield Move(gateway.call_prefill_for_another_prompt, (index,))
    busy = {job.session for job in world.jobs.values()} | world.queues.keys()
    for place, session in enumerate(world.sessions):
        if session in busy:
            yield Move(worker.crash, (place,))
    if world.jobs:
        yield Move(gateway.restart, ())


def _faults_of_messages(world: World) -> Iterator[Move]:
    for session, queue in world.queues.items():
        if _away(world, session):
            continue
        yield Move(network.duplicate, (session,))
        if queue[0].kind != "release":  # a release is sent again until it is answered
            yield Move(network.lose, (session,))
            yield Move(network.delay, (session,))
            if queue[0].kind not in ("seal", "trim") or is_encoding(queue[0].key):  # nobody uses other answers
                yield Move(network.lose_answer, (session,))
    if not any(host.away for host in world.hosts):
        for session in sorted({job.session for job in world.jobs.values() if job.renews}):
            yield Move(network.pass_time, (session,))


def _faults_of_transfers(world: World) -> Iterator[Move]:
    for brought in world.transfers.values():
        if brought.source == "exporting" and brought.reader == "reading" and not brought.cut:
            yield Move(network.cut, (brought.id,))
        job = transfer.waiting_job(world, brought)
        if job is None or brought.reader == "gone":
            continue
        if not brought.prefix:
            yield Move(worker.fetch_failed, (job.id,))
        else:
            yield Move(worker.leave_prefix, (job.id,))
            if brought.reader in ("waiting", "reading"):
                yield Move(transfer.run_out_of_time, (brought.id,))
