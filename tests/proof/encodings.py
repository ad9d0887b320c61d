"""Encodings on workers: services/worker/encodings.py, and those who use it.

One job computes an encoding and holds it until the gateway ends its call. Another job leases the cached blocks for a
prefill worker, which reads the rows while it computes the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import BusyError, UnavailableError
from paceline.services.kvtransfer.ledger.lease import Lease
from tests.proof.calls import Answer
from tests.proof.parties import PREFILL, READ, Job, JobId
from tests.proof.world import World, origin, tables_of


def prefill_of(world: World, job: Job) -> Job | None:
    """Return the prefill job that reads the encoding of this job."""
    return world.jobs.get((PREFILL, origin(job.key.request_id), job.key.attempt))


def waits_for_rows(world: World, job: Job) -> bool:
    """Return whether a job cannot compute a prompt yet, because it does not have the rows of an encoding."""
    return job.role == PREFILL and job.phase == "writing" and bool(world.request(job.request).media) and not job.rows


# ---- answers of the ledger


def _reserve_answered(world: World, job: Job, answer: Answer) -> None:
    if isinstance(answer, Lease) and not job.cancelled:
        phase = "holding" if is_complete(world, job, answer) else "writing"
        world.put(job, phase=phase, tables=tables_of(answer), settled=answer.filled_tokens)
        return
    if isinstance(answer, Lease | UnavailableError):
        world.send(job, "release")
    elif isinstance(answer, BusyError) and world.is_current(job):
        world.asked[job.request] = world.asked[job.request]._replace(phase="waiting")  # not a failed attempt
    world.drop(job)


def _seal_answered(world: World, job: Job, answer: Answer) -> None:
    world.put(job, phase="holding" if isinstance(answer, Lease) else "stopping")


def _pin_answered(world: World, job: Job, answer: Answer) -> None:
    prefill = prefill_of(world, job)
    if isinstance(answer, Lease) and is_complete(world, job, answer) and prefill and prefill.phase == "writing":
        world.put(job, phase="holding", tables=tables_of(answer), settled=answer.filled_tokens)
        world.put(prefill, rows=tuple(answer.tables[0]))
        return
    if isinstance(answer, Lease | UnavailableError):
        world.send(job, "release")
    world.drop(job)


def is_complete(world: World, job: Job, lease: Lease) -> bool:
    """Return whether all rows of the encoding were cached."""
    return lease.filled_tokens == 16 * len(world.request(job.request).media)


ANSWERED: dict[str, Callable[[World, Job, Answer], None]] = {
    "reserve": _reserve_answered,
    "seal": _seal_answered,
    "pin": _pin_answered,
}


# ---- moves


def encode(world: World, job_id: JobId) -> None:
    """Let the encoder write the rows that were not cached, and publish them."""
    job = world.jobs[job_id]
    world.write(job)
    world.send(job, "seal")
    world.put(job, phase="publishing", settled=16 * len(world.request(job.request).media))


def end(world: World, job_id: JobId) -> None:
    """Release an encoding, because the gateway has ended the call that computed it."""
    job = world.jobs[job_id]
    world.drop(job)
    world.send(job, "release")


def let_go(world: World, prefill: Job) -> None:
    """Release the encoding that a prefill job has read, when no step reads its rows any more."""
    reader = world.jobs.get((READ, f"{READ} {prefill.key.request_id}", prefill.key.attempt))
    if reader is not None and reader.phase == "holding":
        world.drop(reader)
        world.send(reader, "release")
