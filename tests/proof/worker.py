"""Workers: services/{prefill,decode}/service.py, which use services/worker/{worker,kv_client}.py.

Functions named `*_answered` handle answers of the ledger; the others are moves. An answer is a lease or the ledger's
error. It is UnavailableError if no answer came.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import BusyError, UnavailableError
from paceline.services.kvtransfer.ledger.lease import Lease, prefix_key
from tests.proof import encodings, judge
from tests.proof.calls import Answer
from tests.proof.parties import DECODE, ENCODE, PREFILL, READ, Job, JobId, Op, Transfer
from tests.proof.world import World, tables_of


def answered(world: World, op: Op, answer: Answer) -> None:
    """Continue the job that waits for this answer."""
    job = _waiting_for(world, op)
    if job is not None:
        answers = encodings.ANSWERED if job.encoding else _ANSWERED
        answers[op.kind](world, job, answer)


def _waiting_for(world: World, op: Op) -> Job | None:
    for role in (PREFILL, DECODE, ENCODE, READ):
        job = world.jobs.get((role, op.key.request_id, op.key.attempt))
        if job is not None and job.session == op.session and job.phase == _WAITS_IN.get(op.kind):
            return job
    return None


def _reserve_answered(world: World, job: Job, answer: Answer) -> None:
    if isinstance(answer, Lease) and not job.cancelled:
        tables = tables_of(answer)
        if job.role == PREFILL:
            world.send(world.put(job, phase="opening"), "open")
        elif job.alone:
            world.put(job, phase="running", tables=tables, settled=answer.filled_tokens)
        else:
            world.put(job, phase="admitted", tables=tables, settled=answer.filled_tokens)
        return
    if isinstance(answer, Lease | UnavailableError):
        world.send(job, "release")
    elif isinstance(answer, BusyError) and job.alone and not job.cancelled:
        world.put(job, phase="waiting")  # it will try again with a new key
        return
    elif isinstance(answer, BusyError) and world.is_current(job):
        world.asked[job.request] = world.asked[job.request]._replace(phase="waiting")  # not a failed attempt
    world.drop(job)


def _open_answered(world: World, job: Job, answer: Answer) -> None:
    if isinstance(answer, Lease) and not job.cancelled and goes_on_with_its_own(world, job, answer):
        world.put(job, key=answer.key, phase="writing", tables=tables_of(answer), settled=answer.filled_tokens)
        if job.reserved and world.is_current(job):
            world.asked[job.request] = world.asked[job.request]._replace(opened=answer.key)
        return
    if isinstance(answer, Lease | UnavailableError):
        world.send(job, "release", job.next_key.generation)
    if job.reserved:
        world.send(job, "release")
    world.drop(job)


def goes_on_with_its_own(world: World, job: Job, opened: Lease) -> bool:
    """Return whether the cached content of the blocks belongs to the prompt that the prefill worker got."""
    return not opened.filled_tokens or opened.context_hash == world.prompt(job).hashes[opened.filled_tokens // 16 - 1]


def _fill_answered(world: World, job: Job, answer: Answer) -> None:
    world.drop(job)
    if not isinstance(answer, Lease) or job.cancelled:
        world.send(job, "release")
    elif world.is_current(job):
        world.asked[job.request] = world.asked[job.request]._replace(filled=answer.key)


def _extend_answered(world: World, job: Job, answer: Answer) -> None:
    if isinstance(answer, Lease):
        world.put(job, phase="running", grown=True, tables=tables_of(answer))
    elif isinstance(answer, BusyError):  # preempted: it leaves the engine, and reserves again with its next generation
        world.send(job, "release")
        world.put(job, phase="waiting", tables=(), alone=True, grown=True)
    else:
        world.put(job, phase="stopping", lost=True)


_ANSWERED: dict[str, Callable[[World, Job, Answer], None]] = {
    "reserve": _reserve_answered,
    "open": _open_answered,
    "fill": _fill_answered,
    "extend": _extend_answered,
}
_WAITS_IN = {
    "reserve": "reserving",
    "open": "opening",
    "fill": "filling",
    "extend": "extending",
    "pin": "pinning",
    "seal": "publishing",
}

# ---- moves of one job


def reserve(world: World, job: Job, prefix_source: int | None = None) -> None:
    """Reserve blocks. If there is a prefix source, first fetch the prefix; reserve even if this fails."""
    if prefix_source is None or not world.request(job.request).reusable:
        world.send(world.put(job, phase="reserving"), "reserve")
        return
    world.put(job, phase="fetching prefix")
    key = prefix_key(job.key)
    transfer = Transfer(job.request, job.host, prefix_source, job.session, job.id, key, key, prefix=True)
    world.transfers[transfer.id] = transfer


def leave_prefix(world: World, job_id: JobId) -> None:
    """End the call for a prefix, because the prefix has come or failed, or because the call breaks.

    kvtransfer learns of a broken call later.
    """
    reserve(world, world.jobs[job_id])


def given(world: World, job: Job, answer: Answer) -> None:
    """Handle the ledger's answer to a job that waits to adopt its blocks. The worker does not know the answer yet."""
    if isinstance(answer, Lease):
        world.put(job, phase="adopting", tables=tables_of(answer), context_hash=answer.context_hash)
        return
    if not job.lost:
        world.send(job, "release")
    world.drop(job)


def hear(world: World, job_id: JobId) -> None:
    """Let the answer reach the worker. It has adopted the blocks, unless it has given them up meanwhile."""
    job = world.jobs[job_id]
    if job.cancelled or job.lost:
        world.drop(job)
        return
    world.put(job, key=job.key._replace(generation=job.key.generation + 2), phase="adopted")


def begin(world: World, job: Job) -> None:
    """Begin to decode. The worker has its blocks, and the first token unless it computes the prompt itself. It gives up
    if the blocks were lost meanwhile or have another prompt."""
    if job.lost:
        world.drop(job)
    elif job.alone:
        world.put(job, phase="running")
    elif not is_filled_with_its_own(world, job):
        world.send(job, "release")
        world.drop(job)
    else:
        judge.check_content(world, job)
        sealable = world.request(job.request).sealable
        if not job.fetch and job.settled < sealable:
            world.send(job, "seal")  # blocks that the prefill worker has not sealed
        world.put(job, phase="running", settled=sealable)


def is_filled_with_its_own(world: World, job: Job) -> bool:
    return job.context_hash == world.request(job.request).name


def adopt_never(world: World, job_id: JobId) -> None:
    """Break the call to adopt, or its answer. The worker gives up the blocks that it reserved."""
    job = world.jobs[job_id]
    if not (job.cancelled or job.lost):
        world.send(job, "release")
    world.drop(job)


def _leave_call(world: World, job: Job) -> None:
    """Stop waiting to adopt. kvtransfer may learn of this after it has carried out the adoption."""
    if job.phase == "admitted":
        world.send_late(Op("adopt", job.host, job.session, job.key), again=False)


def compute(world: World, job_id: JobId) -> None:
    """Let the prefill worker write its blocks, sample the first token, and give its blocks away.

    They go to the decode worker, or back to the pool if the first token is the only one.
    """
    job = world.jobs[job_id]
    judge.check_rows(world, job)
    world.write(job)
    judge.check_content(world, job)
    request = world.request(job.request)
    if job.settled < request.sealable and (job.reserved or request.one_token):
        world.send(job, "seal")  # for readers on another host, or at the end; else the decode worker seals
    job = world.put(job, settled=max(job.settled, request.sealable))
    if request.one_token:
        world.put(job, phase="stopping")
        _succeed(world, job)
    else:
        world.send(job, "fill")
        world.put(job, phase="filling")
        encodings.let_go(world, job)


def generate(world: World, job_id: JobId) -> None:
    """Let the decode worker request more blocks if it needs any, or else compute its tokens."""
    job = world.jobs[job_id]
    request = world.request(job.request)
    if request.growth and not job.grown:
        world.send(job, "extend")
        world.put(job, phase="extending")
        return
    if not job.alone:
        judge.check_content(world, job)
    world.write(job)
    if job.settled < request.sealable:
        world.send(job, "seal")
        job = world.put(job, settled=request.sealable)
    if any(group.shape.window for group in world.setup.layout.groups):
        job = _trim(world, job)
    world.put(job, phase="stopping")
    _succeed(world, job)


def _trim(world: World, job: Job) -> Job:
    """Give back blocks that no query reads any more."""
    world.send(job, "trim")
    trimmed = list(job.tables)
    for index, group in enumerate(world.setup.layout.groups):
        kept = group.first_needed_block(world.request(job.request).context)
        trimmed[index] = judge.without(trimmed[index], kept)
    return world.put(job, tables=tuple(trimmed))


def _succeed(world: World, job: Job) -> None:
    if world.is_current(job):
        world.asked[job.request] = world.asked[job.request]._replace(phase="done", filled=None)


def removed(world: World, job_id: JobId) -> None:
    """Release the blocks, after the engine has confirmed that no step touches them any more."""
    job = world.jobs[job_id]
    world.drop(job)
    world.send(job, "release")
    if job.role == PREFILL:
        encodings.let_go(world, job)


def reserve_again(world: World, job_id: JobId) -> None:
    """Reserve blocks for a preempted request again."""
    job = world.jobs[job_id]
    job = world.put(job, phase="reserving", key=job.next_key)
    world.send(job, "reserve")


def cancel(world: World, job_id: JobId) -> None:
    """Tell a worker that the gateway has given up the attempt."""
    job = world.jobs[job_id]
    match job.phase:
        case "admitted" | "adopted" | "waiting":
            _leave_call(world, job)
            world.send(job, "release")
            world.drop(job)
        case "adopting":
            world.send(job, "release")
            world.put(job, cancelled=True, fetch="")
        case "fetching prefix":
            world.drop(job)
        case "reserving" | "opening" | "filling":
            world.put(job, cancelled=True)
        case _:
            world.put(job, phase="stopping")


def learn_of_loss(world: World, job_id: JobId) -> None:
    """Handle a refused renewal: the lease is lost."""
    job = world.jobs[job_id]
    if job.waits:
        world.send(job, "release")
        world.put(job, lost=True)
    else:
        world.put(job, phase="stopping", lost=True)


def fetch_failed(world: World, job_id: JobId) -> None:
    """Give up a job whose blocks did not come, or whose call for them broke."""
    job = world.jobs[job_id]
    _leave_call(world, job)
    world.send(job, "release")
    world.drop(job)


def scribble(world: World, job: Job) -> None:
    """Write to the blocks in a step that still runs, for a request that stops or a worker that is cut off."""
    world.write(job)


# ---- the end of a worker


def crash(world: World, worker: int) -> None:
    """Replace a worker by a new one. The old one is cut off. It may still write, and its last operation may arrive."""
    session = world.sessions[worker]
    world.sessions[worker] = world.next_session(session)
    world.unnoticed += (session,)
    for op in world.queues.pop(session, ())[:1]:
        world.send_late(op, again=False)
    gone = [job for job in world.jobs.values() if job.session == session]
    for job in gone:
        _leave_call(world, job)
        world.drop(job)
    world.ghosts += tuple(job for job in gone if job.touches and job.tables)
