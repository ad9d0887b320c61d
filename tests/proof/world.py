"""Worlds: hosts with the real ledger and the memory that it manages, and small models of all that send it messages.

A world is plain data. Only *moves* change it, which are functions of the other modules. Between gateway and workers
there are streams. A stream can break, but never repeats or reorders messages, and each side may learn of a break at any
time. The same is true of a transfer between two hosts. An operation between a worker and the ledger may be lost, be
carried out without an answer, arrive late (after operations that were sent after it), or arrive twice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.claim import Claim
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, prefix_key
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transfers.prefixes import Flights
from tests.proof.ledger_copy import copy_fields, copy_ledger
from tests.proof.parties import DECODE, ENCODE, READ, Asked, Job, JobId, Late, Op, Transfer, Word
from tests.proof.setup import Request, Setup

LEASE = 10.0
FIRST_SESSION = TRANSFER + 1
"""Session of the first worker."""


class Violation(AssertionError):
    """A promise that the protocol has broken."""


@dataclass
class Host:
    """A host: its arena, and the service with its ledger."""

    ledger: Ledger
    memory: list[Word | None]
    claims: dict[int, tuple[Claim, ...]] | None = None
    """Claims of workers that have come back, by session, while kvtransfer is away; otherwise None. Meanwhile `ledger`
    is the ledger of the service that ended. No operation reaches it, and only the judge looks at it."""
    flights: Flights[tuple[str, int]] = field(default_factory=Flights)
    """Flights of prefixes, by the ids of their transfers."""

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
    """Number of faults that may still happen."""
    asked: list[Asked]
    sessions: list[int]
    """Session of each worker, decode workers first."""
    queues: dict[int, tuple[Op, ...]]
    """Operations by session. The first one is on its way; the others wait for its answer."""
    jobs: dict[JobId, Job]
    transfers: dict[tuple[str, int], Transfer]
    """Transfers by request id and attempt."""
    late: tuple[Late, ...] = ()
    ghosts: tuple[Job, ...] = ()
    """Jobs of workers that are gone, but may still write."""
    unnoticed: tuple[int, ...] = ()
    """Sessions that have ended, which the ledger has not noticed yet."""
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
        """Return the host of a worker's session, even if the worker is gone."""
        return self.setup.place((session - FIRST_SESSION) % len(self.sessions))

    def next_session(self, session: int) -> int:
        """Return the session of the worker that replaces this one."""
        return session + len(self.sessions)

    def is_current(self, job: Job) -> bool:
        """Return whether the job belongs to the request's present attempt."""
        asked = self.asked[job.request]
        current = (request_id(job.request, asked.life), asked.tries)
        return asked.runs and (origin(job.key.request_id), job.key.attempt) == current

    def prompt(self, job: Job) -> Request:
        """Return the prompt that the job got."""
        request = self.request(job.request)
        return request.another if job.another else request

    def job(self, role: str, index: int) -> Job | None:
        """Return the job of the request's present attempt, or None."""
        asked = self.asked[index]
        return self.jobs.get((role, request_id(index, asked.life, role), asked.tries))

    def room_for(self, index: int, grown: bool, host: int) -> bool:
        """Return whether there are enough blocks for a request, even if it can share none with running requests."""
        request, counts = self.request(index), self.hosts[host].ledger.counts()
        tokens, layout = request.context + grown * request.growth, self.setup.layout
        # A preempted request needs no encoding here: its decode worker's reading is not modelled.
        rows = 0 if grown else layout.part(encoding=True).slots_for(16 * len(request.media))
        return layout.slots_for(tokens) + rows <= counts.free + counts.cached

    def layout(self, job: Job) -> KVLayout:
        """Return the layout of the job's blocks."""
        return self.setup.layout.part(job.encoding)

    def word(self, job: Job, group: int, block: int) -> Word:
        """Return the content of a job's block after its tokens are computed."""
        request, layout = self.prompt(job), self.layout(job)
        end = (block + 1) * layout.groups[group].block_tokens
        if job.encoding:
            return (layout.first_group + group, request.media_hashes[end // 16 - 1])
        if end <= request.sealable:
            return (group, request.hashes[end // 16 - 1])
        return (*job.key[:2], group, block)

    def may_write(self, job: Job, group: int, block: int) -> bool:
        return (block + 1) * self.layout(job).groups[group].block_tokens > job.settled

    # ---- changing

    def put(self, job: Job, **changes: object) -> Job:
        """Store and return the changed job."""
        job = job._replace(**changes)  # type: ignore[arg-type]
        self.jobs[job.id] = job
        return job

    def drop(self, job: Job) -> None:
        del self.jobs[job.id]

    def send(self, job: Job, kind: str, generation: int | None = None) -> None:
        """Submit an operation after all others of the same worker."""
        key = job.key if generation is None else job.key._replace(generation=generation)
        published = job.settled if kind == "seal" else 0
        context = self.prompt(job).name if kind == "fill" else b""
        op = Op(kind, job.host, job.session, key, published, job.another, context)
        self.queues[job.session] = (*self.queues.get(job.session, ()), op)

    def send_late(self, op: Op, again: bool) -> None:
        """Leave an operation on its way; it may arrive at any time."""
        self.late += (Late(op, again),)

    def write(self, job: Job) -> None:
        """Write to all blocks that the job's engine may write to, as far as it knows."""
        for group, block, slot in blocks_of(job.tables):
            if self.may_write(job, group, block):
                self.hosts[job.host].memory[slot] = self.word(job, group, block)


_PREFIX = prefix_key(Key("", 0, 0)).request_id
_ORIGINS = ("", _PREFIX, f"{ENCODE} ", f"{READ} ")
"""Beginnings of the ids in keys of leases. A lease of an encoding has a key of its own."""


def request_id(index: int, life: int, role: str = DECODE) -> str:
    return f"{role} {index}.{life}" if role in (ENCODE, READ) else f"{index}.{life}"


def origin(request_id: str) -> str:
    """Return the id of the request, also for the id with which its prefix is moved or its encoding is held."""
    return request_id.removeprefix(_ORIGINS[kind_of(request_id)])


def kind_of(request_id: str) -> int:
    """Return for what a lease is: 0 for the request's KV, 1 for moving a prefix, 2 and 3 for an encoding."""
    return next((kind for kind, begin in enumerate(_ORIGINS) if kind and request_id.startswith(begin)), 0)


def is_prefix(key: Key) -> bool:
    """Return whether a lease is for the transfer of a prefix."""
    return kind_of(key.request_id) == 1


def is_encoding(key: Key) -> bool:
    """Return whether a lease is of an encoding."""
    return kind_of(key.request_id) > 1


def tables_of(lease: Lease) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, lease.tables))


def blocks_of(tables: tuple[tuple[int, ...], ...]) -> list[tuple[int, int, int]]:
    """Return (group, block, slot) of all blocks in the tables."""
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
    """Cache a text, as if an earlier request had left it. The layout must have one group."""
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
