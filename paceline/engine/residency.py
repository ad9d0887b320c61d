"""Where the blocks lie that a device computes in: in the host's arena itself, or in a pool of its own above it.

A request always holds blocks of the arena (`Request.tables`). A device with a pool of its own has a copy of each that a
running request needs (`Request.pool_tables`). Blocks are stored in the arena as they become full, where others find
them; so a request can leave the pool at any time: only its last, partial blocks are to be stored then, and to come back
means to load. Nothing is moved here: whoever moves blocks takes the `Copies` and says when they have been made.

Pure, like the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.core.block_pool import BlockPool
from paceline.core.kv_layout import NO_SLOT, KVLayout, slots_tail_first
from paceline.engine.pool_directory import Move, PoolDirectory
from paceline.engine.request import Request
from paceline.engine.step import Event

_WEIGHT = 0.1
"""Of a new figure in an average."""

_TELLING_LOADS = 4
"""Of blocks together, at least, that tell how long one takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Blocks of one request to be copied. Those of a request are copied in order."""

    request: Request
    loads: list[Move] = field(default_factory=list)
    """From the arena into the pool."""
    stores: list[Move] = field(default_factory=list)
    """The other way."""
    events: list[Event] = field(default_factory=list)
    """What is true once they have been made."""


class Residency(Protocol):
    """Owns `pool_tables`, `loading` and `copies` of all requests."""

    def enter(self, request: Request, tokens_per_second: float) -> bool:
        """Gives a request its blocks in the pool; False where there are not enough. It cannot run while `loading`.

        Args:
            tokens_per_second: at which prompts are computed; 0 where nobody knows.
        """

    def cover(self, request: Request) -> bool:
        """Gives it blocks for what its tables have grown by; False where there are not enough."""

    def sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        """Blocks have become full. Comes before `trimmed`, and both come before `tell`."""

    def trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        """Blocks before this one are needed no more."""

    def tell(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        """Of these events those that are true already. The others come from `copied`, once the arena has what was
        sealed before; where `whole`, also what is in partial blocks."""

    def leave(self, request: Request) -> None:
        """Takes back a request's blocks. No step includes it and none of its copies is under way."""

    def take_copies(self) -> list[Copies]:
        """What is to be copied since the last call, in order."""

    def copied(self, copies: Copies, seconds: float) -> list[Event]:
        """These have been made, in so much time. Returns what is true now."""

    def stats(self) -> dict[str, float]:
        """For load reports: slots of a pool of its own, by what is done with them. Any thread may call this."""


class InArena:
    """The device computes in the arena: nothing is ever copied."""

    def enter(self, request: Request, tokens_per_second: float) -> bool:
        request.pool_tables = request.tables
        return True

    def cover(self, request: Request) -> bool:
        return True

    def sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        pass

    def trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        pass

    def tell(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        return events

    def leave(self, request: Request) -> None:
        request.pool_tables = None

    def take_copies(self) -> list[Copies]:
        return []

    def copied(self, copies: Copies, seconds: float) -> list[Event]:
        return copies.events

    def stats(self) -> dict[str, float]:
        return {}


class OnDevice:
    """The device has `slots` slots of its own.

    Full blocks stay when their request leaves, until room is needed: who needs one of them next loads nothing.

    Args:
        directory: what other processes know of the pool, where they can read it.
    """

    def __init__(self, layout: KVLayout, slots: int, directory: PoolDirectory | None = None) -> None:
        self._directory = directory
        self._groups = layout.groups
        self._pool = BlockPool(slots, len(layout.groups))
        self._copies: list[Copies] = []
        self._refused: Request | None = None
        """Found no room, and none has come since."""
        self._stores: list[Move] = []
        """Of what was sealed since the last `tell`."""
        self._block_seconds = 0.0
        """To load a block; 0 as long as nobody knows."""

    def enter(self, request: Request, tokens_per_second: float) -> bool:
        if request is self._refused:
            return False  # looking again takes long with long contexts
        blocks = list(self._needed(request))
        found = [self._pool.find(block.group, block.digest) if block.is_full else None for block in blocks]
        reused = [slot for slot in found if slot is not None]
        if len(blocks) - len(reused) > self._pool.available(reused):
            self._refused = request
            return False
        loads = sum(slot is None and block.digest != b"" for block, slot in zip(blocks, found))
        if self._is_cheaper_computed(request, loads, tokens_per_second):
            request.start_over()
            return self.enter(request, tokens_per_second)
        self._pool.reuse(reused)
        fresh = iter(self._take(len(blocks) - len(reused)))
        request.pool_tables = [[NO_SLOT] * len(table) for table in request.tables]
        copies = Copies(request)
        for block, known in zip(blocks, found):
            slot = request.pool_tables[block.group][block.place] = next(fresh) if known is None else known
            if block.digest and known is None:
                arena_slot = request.tables[block.group][block.place]
                copies.loads.append(Move(slot, arena_slot, block.group, block.digest, block.is_full))
        if copies.loads:
            request.loading = True
            self._submit(copies)
        return True

    def cover(self, request: Request) -> bool:
        assert request.pool_tables is not None
        missing = [len(table) - len(own) for table, own in zip(request.tables, request.pool_tables)]
        if sum(missing) > self._pool.available():
            return False
        fresh = self._take(sum(missing))
        for own, count in zip(request.pool_tables, missing):
            own += fresh[:count]
            del fresh[:count]
        return True

    def sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        assert request.pool_tables is not None
        for block, digest in enumerate(hashes, first_block):
            slot = request.pool_tables[group][block]
            self._pool.seal(slot, group, digest)
            self._store(Move(slot, request.tables[group][block], group, digest))

    def trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        assert request.pool_tables is not None
        table = request.pool_tables[group]
        self._give_back([slot for slot in table[:first_kept_block] if slot != NO_SLOT])
        table[:first_kept_block] = [NO_SLOT] * first_kept_block

    def tell(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        if whole:
            self._store_partial(request)
        if not self._stores and not request.copies:
            return events
        if self._stores or events:
            self._submit(Copies(request, stores=self._stores, events=events))
            self._stores = []
        return []

    def leave(self, request: Request) -> None:
        if request.pool_tables is not None:
            self._give_back(slots_tail_first(self._groups, request.pool_tables))
            request.pool_tables = None

    def take_copies(self) -> list[Copies]:
        copies, self._copies = self._copies, []
        return copies

    def copied(self, copies: Copies, seconds: float) -> list[Event]:
        copies.request.copies -= 1
        self._publish(copies.stores)
        self._give_back([move.pool_slot for move in copies.stores])
        if copies.loads:
            copies.request.loading = False
            if len(copies.loads) >= _TELLING_LOADS:
                self._block_seconds = _average(self._block_seconds, seconds / len(copies.loads))
            full = [move for move in copies.loads if move.is_full]
            for move in full:
                self._pool.seal(move.pool_slot, move.group, move.digest)
            self._publish(full)
        return copies.events

    def stats(self) -> dict[str, float]:
        return {f"blocks_{name}": count for name, count in self._pool.counts()._asdict().items()}

    def _needed(self, request: Request) -> Iterator[_Block]:
        """The blocks that a request goes on with."""
        for number, (group, table) in enumerate(zip(self._groups, request.tables)):
            filled = request.filled_len(number)
            for index in range(group.first_needed_block(filled), len(table)):
                if table[index] != NO_SLOT:
                    is_full = (index + 1) * group.block_tokens <= filled
                    digest = request.hash_of(number, index) if index * group.block_tokens < filled else b""
                    yield _Block(number, index, is_full, digest)

    def _is_cheaper_computed(self, request: Request, loads: int, tokens_per_second: float) -> bool:
        """Whether to compute the context again takes less time than to load so many blocks."""
        if any(group.shape.window for group in self._groups) or request.sampling.prompt_logprobs is not None:
            return False  # of the beginning not all blocks are there to be computed in, or it was reported already
        if request.computed_len >= loads * self._block_seconds * tokens_per_second:
            return False
        # No load will tell that they have become faster: so the figure does not stand for ever.
        self._block_seconds *= 1 - _WEIGHT
        return True

    def _store_partial(self, request: Request) -> None:
        assert request.pool_tables is not None
        for number, (group, table) in enumerate(zip(self._groups, request.pool_tables)):
            block, rest = divmod(request.filled_len(number), group.block_tokens)
            # One that is sealed is whole there, and others read it; here it is being computed again.
            if rest and block >= request.sealed_blocks[number]:
                digest = request.hash_of(number, block)
                self._store(Move(table[block], request.tables[number][block], number, digest, is_full=False))

    def _store(self, move: Move) -> None:
        # Its slot is nobody else's until it is stored, also where the request gives it back before.
        self._pool.share((move.pool_slot,))
        self._stores.append(move)

    def _take(self, count: int) -> list[int]:
        slots = self._pool.take(count)
        if self._directory is not None:
            self._directory.withdraw(slots)
        return slots

    def _publish(self, moves: Iterable[Move]) -> None:
        """Nobody writes to these blocks from now on, until they are taken by somebody else."""
        if self._directory is not None:
            self._directory.publish(moves)

    def _give_back(self, slots: Sequence[int]) -> None:
        self._pool.give_back(slots)
        self._refused = None

    def _submit(self, copies: Copies) -> None:
        copies.request.copies += 1
        self._copies.append(copies)


class _Block(NamedTuple):
    group: int
    place: int
    is_full: bool
    digest: bytes
    """The name of what is in it; empty where there is nothing."""


def _average(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
