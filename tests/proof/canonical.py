"""One name for all worlds that differ only in how requests, workers, sessions and blocks are called."""

from __future__ import annotations

import hashlib
import itertools
import marshal
from collections.abc import Iterable

from paceline.core.kv_layout import NO_SLOT
from paceline.services.kvtransfer.claim import Claim
from paceline.services.kvtransfer.hold import NOBODY, Hold
from tests.proof.judge import lives
from tests.proof.world import DECODE, Asked, Job, Op, World


def digest(world: World) -> bytes:
    """16 bytes.

    Left out is what has no effect: instants (a hold is renewed before the next lease is over, or it is not), what free
    blocks contain, and what is remembered of attempts to which no message refers.
    """
    looks = [_look(world, index) for index in range(len(world.asked))]
    expected = sorted(looks)
    # Only requests that look alike can stand in either order.
    orders = [
        order for order in itertools.permutations(range(len(looks))) if [looks[index] for index in order] == expected
    ]
    return hashlib.blake2b(min(_Encoder(world, order).encode() for order in orders), digest_size=16).digest()


def _look(world: World, index: int) -> tuple[object, ...]:
    asked, request = world.asked[index], world.request(index)
    jobs = sorted(job.phase for job in world.jobs.values() if job.request == index)
    return (request.text, request.tail, request.one_token, asked.phase, asked.failures, jobs)


class _Encoder:
    """Describes a world for one order of its requests. What has a name gets a number when it is first met."""

    def __init__(self, world: World, order: tuple[int, ...]) -> None:
        self._world = world
        self._order = order
        self._rank = {index: rank for rank, index in enumerate(order)}
        self._sessions: dict[int, int] = {NOBODY: 0}
        self._slots: dict[int, int] = {NO_SLOT: -1}
        self._names: dict[tuple[str, int], tuple[int, int, int]] = {}

    def encode(self) -> bytes:
        world = self._world
        parts: list[object] = [world.faults]
        for index in self._order:
            parts.append(self._asked(index, world.asked[index]))
            parts.append([self._job(job) for job in self._sorted(world.jobs.values()) if job.request == index])
            parts.append([self._hold(hold) for hold in self._holds(index)])
        parts.append([self._job(job) for job in self._sorted(world.ghosts)])
        for queue in sorted(world.queues.values(), key=lambda queue: list(map(self._rank_of, queue))):
            parts.append([self._op(op) for op in queue])
        for late in sorted(world.late, key=lambda late: self._rank_of(late.op)):
            parts.append([*self._op(late.op), late.again])
        parts.append(sorted(self._session(session) for session in world.unnoticed))
        parts.append(world.claims is None)
        if world.claims is not None:
            for session in sorted(world.claims, key=lambda session: self._session(session)):
                parts.append((self._session(session), [self._claim(claim) for claim in world.claims[session]]))
        parts.append([world.ledger._pool.name(slot) for slot in world.ledger._pool._cached])  # type: ignore[arg-type]
        return marshal.dumps(parts, 2)  # without references, so that equal parts have equal bytes

    def _asked(self, index: int, asked: Asked) -> object:
        prefiller = self._session(self._world.sessions[asked.prefiller]) if asked.phase == "admitting" else 0
        request = self._world.setup.requests.index(self._world.request(index))
        return (request, asked.failures, asked.phase, prefiller, asked.filled is not None)

    def _sorted(self, jobs: Iterable[Job]) -> list[Job]:
        return sorted(jobs, key=lambda job: (self._name(job.key), job.role == DECODE, job.phase))

    def _holds(self, index: int) -> list[Hold]:
        prefix = f"{index}."
        found = [hold for hold in self._world.ledger.holds() if hold.key.request_id.startswith(prefix)]
        return sorted(found, key=lambda hold: (self._name(hold.key), hold.key.generation))

    def _name(self, key: tuple[str, int, int]) -> tuple[int, int, int]:
        """(request, lives ago, attempts ago)"""
        known = self._names.get(key[:2])
        if known is None:
            index, life = map(int, key[0].split("."))
            asked = self._world.asked[index]
            attempt = asked.tries - key[1] if asked.life == life else key[1]
            known = self._names[key[:2]] = (self._rank[index], asked.life - life, attempt)
        return known

    def _session(self, session: int) -> int:
        return self._sessions.setdefault(session, len(self._sessions))

    def _job(self, job: Job) -> object:
        tables = [[self._slots.setdefault(slot, len(self._slots)) for slot in table] for table in job.tables]
        flags = (job.cancelled, job.lost, job.grown, job.alone)
        name = (*self._name(job.key), job.key.generation)
        return (job.role, self._session(job.session), name, job.phase, tables, job.settled, flags)

    def _claim(self, claim: Claim) -> object:
        tables = [[self._slots.setdefault(slot, len(self._slots)) for slot in table] for table in claim.tables]
        return (self._name(claim.key), claim.key.generation, tables, claim.names, claim.active)

    def _hold(self, hold: Hold) -> object:
        owner, writer = self._session(hold.owner), self._session(hold.writer)
        name = (*self._name(hold.key), hold.key.generation, hold.first_generation)
        # A draining hold that waits for a word of its writer differs from one whose grace runs.
        rest = (hold.state.value, hold.token_count, hold.filled_tokens, not lives(hold) and hold.deadline < 1e18)
        return (name, owner, writer, rest, [[self._block(hold, slot) for slot in table] for table in hold.tables])

    def _block(self, hold: Hold, slot: int) -> object:
        world = self._world
        number = self._slots.setdefault(slot, len(self._slots))
        if slot == NO_SLOT:
            return number
        name = world.ledger._pool.name(slot)
        shared = name is not None and world.ledger._pool.find(*name) == slot
        word = world.memory[slot]
        if word is not None and isinstance(word[0], str):
            word = self._word(hold, word)
        return (number, name, shared, word)

    def _word(self, hold: Hold, word: tuple[object, ...]) -> object:
        """A block's content matters only where it is what this hold's attempt has written there."""
        return word[2:] if word[:2] == hold.key[:2] else None

    def _rank_of(self, op: Op) -> tuple[object, ...]:
        return (self._name(op.key), op.kind, op.key.generation)

    def _op(self, op: Op) -> list[object]:
        ended = self._world.ledger._book._ended.get(op.key[:2], -1)
        return [self._session(op.session), op.kind, *self._name(op.key), op.key.generation, op.published, ended]
