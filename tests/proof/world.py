"""Hosts, each with the real ledger and the memory it manages, and small models of everybody who sends them messages.

A world is plain data. Everything that can happen to it is a *move*, a function of the other modules; nothing else
changes it. Between gateway and workers there are streams, which break but never repeat or reorder; what each side
learns of a break, and when, is free. The same leases for a transfer between two hosts. Between workers and the ledger
each operation may be lost, carried out without an answer, come late (behind what was sent after it), or come twice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.services.kvtransfer.claim import Claim
from paceline.services.kvtransfer.flights import Flights
from paceline.services.kvtransfer.lease import TRANSFER, Lease, prefix_key
from paceline.services.kvtransfer.ledger import Ledger
from tests.proof.ledger_copy import copy_fields, copy_ledger
from tests.proof.parties import Asked, Job, JobId, Late, Op, Transfer, Word
from tests.proof.setup import Request, Setup

LEASE = 10.0
FIRST_SESSION = TRANSFER + 1
"""Of a worker."""


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass
class Host:
    """An arena, and the service that keeps its ledger."""

    ledger: Ledger
    memory: list[Word | None]
    claims: dict[int, tuple[Claim, ...]] | None = None
    """Set while kvtransfer is away: by session, what workers that have come back say they hold. Nothing reaches the
    ledger, which is still that of the service that ended, for the judge to see."""
    flights: Flights[tuple[str, int]] = field(default_factory=Flights)
    """Of prefixes, by the ids of their transfers."""

    @property
    def away(self) -> bool:
        return self.claims is not None

    def copy(self) -> Host:
        claims = None if self.claims is None else self.claims.copy()
        return Host(copy_ledger(self.ledger), self.memory.copy(), claims, copy_fields(self.flights))


@dataclass
class World:
    setup: Setup
    hosts: list[Host]
    faults: int
    """How many more may happen."""
    asked: list[Asked]
    sessions: list[int]
    """Of each worker, decode workers first."""
    queues: dict[int, tuple[Op, ...]]
    """By session; the first one is on its way, the others wait for its answer."""
    jobs: dict[JobId, Job]
    transfers: dict[tuple[str, int], Transfer]
    """By request id and attempt."""
    late: tuple[Late, ...] = ()
    ghosts: tuple[Job, ...] = ()
    """Jobs of workers that are gone, but may still write."""
    unnoticed: tuple[int, ...] = ()
    """Sessions that are over without the ledger's knowing."""
    now: float = 0.0

    def copy(self) -> World:
        twin = copy.copy(self)
        twin.hosts = [host.copy() for host in self.hosts]
        twin.asked, twin.sessions = self.asked.copy(), self.sessions.copy()
        twin.queues, twin.jobs, twin.transfers = self.queues.copy(), self.jobs.copy(), self.transfers.copy()
        return twin

    # ---- reading

    def request(self, index: int) -> Request:
        return self.setup.requests[index]

    def host_of(self, session: int) -> int:
        """Of a worker, also one that is gone."""
        return self.setup.place((session - FIRST_SESSION) % len(self.sessions))

    def next_session(self, session: int) -> int:
        """Of the worker that takes the place of this one."""
        return session + len(self.sessions)

    def is_current(self, job: Job) -> bool:
        """Whether the gateway still wants what this job does."""
        asked = self.asked[job.request]
        return asked.runs and job.key[:2] == (request_id(job.request, asked.life), asked.tries)

    def prompt(self, job: Job) -> Request:
        """What it was given to compute."""
        request = self.request(job.request)
        return request.another if job.another else request

    def job(self, role: str, index: int) -> Job | None:
        """The job of the request's attempt that runs now."""
        asked = self.asked[index]
        return self.jobs.get((role, request_id(index, asked.life), asked.tries))

    def room_for(self, index: int, grown: bool, host: int) -> bool:
        """Whether a request finds blocks, also where it can share none with others that run."""
        request, counts = self.request(index), self.hosts[host].ledger.counts()
        tokens = request.context + grown * request.growth
        return self.setup.layout.slots_for(tokens) <= counts.free + counts.cached

    def word(self, job: Job, group: int, block: int) -> Word:
        """What the block of a job contains when its tokens have been computed."""
        request, tokens = self.prompt(job), self.setup.layout.groups[group].block_tokens
        end = (block + 1) * tokens
        if end <= request.sealable:
            return (group, request.hashes[end // 16 - 1])
        return (*job.key[:2], group, block)

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
        published = job.settled if kind == "seal" else 0
        context = self.prompt(job).name if kind == "fill" else b""
        op = Op(kind, job.host, job.session, key, published, job.another, context)
        self.queues[job.session] = (*self.queues.get(job.session, ()), op)

    def send_late(self, op: Op, again: bool) -> None:
        """Leaves an operation on its way, to come at any time."""
        self.late += (Late(op, again),)

    def write(self, job: Job) -> None:
        """The job's engine writes to all blocks that it may write to, as far as it knows."""
        for group, block, slot in blocks_of(job.tables):
            if self.may_write(job, group, block):
                self.hosts[job.host].memory[slot] = self.word(job, group, block)


def request_id(index: int, life: int) -> str:
    return f"{index}.{life}"


def origin(request_id: str) -> str:
    """The request's own id, also of the one under which its prefix is moved."""
    return request_id.removeprefix(_PREFIX)


def is_prefix(key: Key) -> bool:
    """Whether a lease is one in which a prefix is moved."""
    return key.request_id.startswith(_PREFIX)


_PREFIX = prefix_key(Key("", 0, 0)).request_id


def tables_of(lease: Lease) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, lease.tables))


def blocks_of(tables: tuple[tuple[int, ...], ...]) -> list[tuple[int, int, int]]:
    """(group, block, slot) of all that there are."""
    return [
        (group, block, slot)
        for group, table in enumerate(tables)
        for block, slot in enumerate(table)
        if slot != NO_SLOT
    ]


def make_ledger(setup: Setup) -> Ledger:
    return Ledger(setup.layout, setup.slots, LEASE, setup.policy(setup.slots))


def make_host(setup: Setup) -> Host:
    return Host(make_ledger(setup), [None] * setup.slots)


def _cache(host: Host, text: str) -> None:
    """As if a request had been served that left this; in a layout of one group."""
    hashes, ledger = Request(text, tail=0).hashes, host.ledger
    tokens, session = 16 * len(hashes), FIRST_SESSION - 2
    lease = ledger.reserve(session, Key(f"left {text}", 1, 1), hashes, tokens, 0, 0.0)
    for slot, digest in zip(lease.tables[0], hashes):
        host.memory[slot] = (0, digest)
    ledger.seal(session, lease.key, 0, 0, hashes, 0.0)
    ledger.release(session, lease.key, 0.0)


def make_world(setup: Setup) -> World:
    hosts = [make_host(setup) for _ in range(setup.hosts)]
    for host, text in setup.cached:
        _cache(hosts[host], text)
    return World(
        setup=setup,
        hosts=hosts,
        faults=setup.faults,
        asked=[Asked() for _ in setup.requests],
        sessions=[FIRST_SESSION + worker for worker in range(setup.decoders + setup.prefillers)],
        queues={},
        jobs={},
        transfers={},
    )
