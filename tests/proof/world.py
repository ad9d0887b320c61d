"""One host: the real ledger, the memory it manages, and small models of everybody who sends it messages.

A world is plain data. Everything that can happen to it is a *move*, a function of the other modules; nothing else
changes it. Between gateway and workers there are streams, which break but never repeat or reorder; what each side
learns of a break, and when, is free. Between workers and the ledger each operation may be lost, carried out without an
answer, come late (behind what was sent after it), or come twice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.services.kvtransfer.claim import Claim
from paceline.services.kvtransfer.hold import Hold
from paceline.services.kvtransfer.ledger import Ledger
from tests.proof.ledger_copy import copy_ledger
from tests.proof.setup import Request, Setup

LEASE = 10.0
DECODE, PREFILL = "decode", "prefill"

Word = tuple[object, ...]
"""What is in a block: (group, hash) where it may be shared, else (request, attempt, group, block)."""


class Violation(AssertionError):
    """The protocol broke a promise."""


class Op(NamedTuple):
    """An operation on its way from a worker to the ledger."""

    kind: str
    session: int
    key: Key
    published: int = 0
    """For seal: tokens at the front that need no publishing."""


class Late(NamedTuple):
    """An operation that its sender has given up, or that comes a second time."""

    op: Op
    again: bool
    """Whether it has been carried out already."""


JobId = tuple[str, str, int]
"""(role, request id, attempt)"""


class Job(NamedTuple):
    """One attempt on one worker: what that worker believes."""

    role: str
    session: int
    request: int
    key: Key
    phase: str
    tables: tuple[tuple[int, ...], ...] = ()
    settled: int = 0
    """Tokens at the front whose blocks it will not write any more."""
    cancelled: bool = False
    lost: bool = False
    """Whether it was told that its lease had ended."""
    grown: bool = False
    alone: bool = False
    """Whether it was preempted, and computes its context itself."""

    @property
    def id(self) -> JobId:
        return (self.role, self.key.request_id, self.key.attempt)

    @property
    def next_key(self) -> Key:
        return self.key._replace(generation=self.key.generation + 1)

    @property
    def touches(self) -> bool:
        """Whether its engine may be writing."""
        return self.phase in ("writing", "running", "extending", "stopping")

    @property
    def renews(self) -> bool:
        """Whether its worker renews the lease."""
        held = self.touches or self.phase in ("admitted", "adopting")
        return held and not self.lost and not (self.cancelled and self.phase == "adopting")


class Asked(NamedTuple):
    """A request as the gateway knows it."""

    life: int = 0
    """Grows when a new gateway gets the request again."""
    tries: int = 0
    failures: int = 0
    phase: str = "waiting"
    prefiller: int = -1
    filled: Key | None = None
    """Where its prefill worker has said that the blocks are complete."""

    @property
    def runs(self) -> bool:
        return self.phase in ("admitting", "prefilling", "decoding")


@dataclass
class World:
    setup: Setup
    ledger: Ledger
    faults: int
    """How many more may happen."""
    memory: list[Word | None]
    asked: list[Asked]
    sessions: list[int]
    """Of each worker, decode workers first."""
    queues: dict[int, tuple[Op, ...]]
    """By session; the first one is on its way, the others wait for its answer."""
    jobs: dict[JobId, Job]
    late: tuple[Late, ...] = ()
    ghosts: tuple[Job, ...] = ()
    """Jobs of workers that are gone, but may still write."""
    unnoticed: tuple[int, ...] = ()
    """Sessions that are over without the ledger's knowing."""
    claims: dict[int, tuple[Claim, ...]] | None = None
    """Set while kvtransfer is away: by session, what workers that have come back say they hold. Nothing reaches the
    ledger, which is still that of the service that ended, for the judge to see."""
    now: float = 0.0

    def copy(self) -> World:
        twin = copy.copy(self)
        twin.ledger = copy_ledger(self.ledger)
        twin.memory, twin.asked, twin.sessions = self.memory.copy(), self.asked.copy(), self.sessions.copy()
        twin.queues, twin.jobs = self.queues.copy(), self.jobs.copy()
        twin.claims = None if self.claims is None else self.claims.copy()
        return twin

    # ---- reading

    def request(self, index: int) -> Request:
        return self.setup.requests[index]

    def is_current(self, job: Job) -> bool:
        """Whether the gateway still wants what this job does."""
        asked = self.asked[job.request]
        return asked.runs and job.key[:2] == (request_id(job.request, asked.life), asked.tries)

    def job(self, role: str, index: int) -> Job | None:
        """The job of the request's attempt that runs now."""
        asked = self.asked[index]
        return self.jobs.get((role, request_id(index, asked.life), asked.tries))

    def room_for(self, index: int, grown: bool) -> bool:
        """Whether a request finds blocks, also where it can share none with others that run."""
        request, counts = self.request(index), self.ledger.counts()
        tokens = request.context + grown * request.growth
        return self.setup.layout.slots_for(tokens) <= counts.free + counts.cached

    def word(self, job: Job, group: int, block: int) -> Word:
        """What the block of a job contains when its tokens have been computed."""
        request, tokens = self.request(job.request), self.setup.layout.groups[group].block_tokens
        end = (block + 1) * tokens
        if end <= request.sealable:
            return (group, request.hashes[end // 16 - 1])
        return (*job.key[:2], group, block)

    def blocks(self, job: Job) -> list[tuple[int, int, int]]:
        """(group, block, slot) of all that a job has."""
        return [
            (group, block, slot)
            for group, table in enumerate(job.tables)
            for block, slot in enumerate(table)
            if slot != NO_SLOT
        ]

    def may_write(self, job: Job, group: int, block: int) -> bool:
        return (block + 1) * self.setup.layout.groups[group].block_tokens > job.settled

    # ---- changing

    def put(self, job: Job, **changes: object) -> Job:
        """Stores a job as it is now."""
        job = job._replace(**changes)  # type: ignore[arg-type]
        self.jobs[job.id] = job
        return job

    def drop(self, job: Job) -> None:
        del self.jobs[job.id]

    def send(self, job: Job, kind: str, generation: int | None = None) -> None:
        """Submits an operation behind all others of the same worker."""
        key = job.key if generation is None else job.key._replace(generation=generation)
        op = Op(kind, job.session, key, job.settled if kind == "seal" else 0)
        self.queues[job.session] = (*self.queues.get(job.session, ()), op)

    def send_late(self, op: Op, again: bool) -> None:
        """Leaves an operation on its way, to come at any time."""
        self.late += (Late(op, again),)

    def write(self, job: Job) -> None:
        """The job's engine writes to all blocks that it may write to, as far as it knows."""
        for group, block, slot in self.blocks(job):
            if self.may_write(job, group, block):
                self.memory[slot] = self.word(job, group, block)


def request_id(index: int, life: int) -> str:
    return f"{index}.{life}"


def tables_of(hold: Hold) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, hold.tables))


def make_world(setup: Setup) -> World:
    return World(
        setup=setup,
        ledger=Ledger(setup.layout, setup.slots, LEASE),
        faults=setup.faults,
        memory=[None] * setup.slots,
        asked=[Asked() for _ in setup.requests],
        sessions=list(range(1, setup.decoders + setup.prefillers + 1)),
        queues={},
        jobs={},
    )
