"""A device's own pool of blocks above the host's arena. Pure, like the scheduler; see `compute_pool`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paceline.core.block_pool import BlockPool, Counts
from paceline.core.kv_layout import NO_SLOT, KVLayout, slots_tail_first
from paceline.engine.compute_pool import CopyBatch
from paceline.engine.pool_directory import BlockCopy, PoolDirectory
from paceline.engine.request import Request
from paceline.engine.step import Event

_WEIGHT = 0.1
"""Of a new figure in an average."""

_TELLING_LOADS = 4
"""Of blocks together, at least, that tell how long one takes."""


class DevicePool:
    """The device has `slots` slots of its own.

    Full blocks stay when their request leaves, until room is needed: who needs one of them next loads nothing.

    Args:
        directory: what other processes know of the pool, where they can read it.
    """

    def __init__(self, layout: KVLayout, slots: int, directory: PoolDirectory | None = None) -> None:
        self._directory = directory
        self._groups = layout.groups
        self._pool = BlockPool(slots, len(layout.groups))
        self._copies: list[CopyBatch] = []
        self._refused: Request | None = None
        """Found no room, and none has come since."""
        self._stores: list[BlockCopy] = []
        """Of what was sealed since the last `tell`."""
        self._block_seconds = 0.0
        """To load a block; 0 as long as nobody knows."""

    def admit(self, request: Request, tokens_per_second: float) -> bool:
        if request is self._refused:
            return False  # looking again takes long with long contexts
        blocks = list(self._needed(request))
        found = self._found(blocks)
        reused = [slot for slot in found if slot is not None]
        if len(blocks) - len(reused) > self._pool.available(reused):
            self._refused = request
            return False
        loads = sum(slot is None and block.digest != b"" for block, slot in zip(blocks, found))
        if self._is_cheaper_computed(request, loads, tokens_per_second):
            request.start_over()
            return self.admit(request, tokens_per_second)
        copies = CopyBatch(request, loads=self._give(request, blocks, found))
        if copies.loads:
            request.swapping_in = True
            self._submit(copies)
        return True

    def extend(self, request: Request) -> bool:
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
            self._store(BlockCopy(slot, request.tables[group][block], group, digest))

    def trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        assert request.pool_tables is not None
        table = request.pool_tables[group]
        self._give_back([slot for slot in table[:first_kept_block] if slot != NO_SLOT])
        table[:first_kept_block] = [NO_SLOT] * first_kept_block

    def when_stored(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        if whole:
            self._store_partial(request)
        if not self._stores and not request.copies:
            return events
        if self._stores or events:
            self._submit(CopyBatch(request, stores=self._stores, events=events))
            self._stores = []
        return []

    def release(self, request: Request) -> None:
        if request.pool_tables is not None:
            self._give_back_all(request)

    def take_copies(self) -> list[CopyBatch]:
        copies, self._copies = self._copies, []
        return copies

    def copied(self, copies: CopyBatch, seconds: float) -> list[Event]:
        copies.request.copies -= 1
        self._publish(copies.stores)
        self._give_back([move.pool_slot for move in copies.stores])
        if len(copies.loads) >= _TELLING_LOADS:
            self._block_seconds = _average(self._block_seconds, seconds / len(copies.loads))
        if copies.loads:
            copies.request.swapping_in = False
            self._take_in(copies.loads)
        return copies.events

    def counts(self) -> Counts | None:
        return self._pool.counts()

    def _needed(self, request: Request) -> Iterator[_Block]:
        """The blocks that a request goes on with."""
        for number, (group, table) in enumerate(zip(self._groups, request.tables)):
            filled = request.filled_len(number)
            for index in range(group.first_needed_block(filled), len(table)):
                if table[index] != NO_SLOT:
                    is_full = (index + 1) * group.block_tokens <= filled
                    digest = request.hash_of(number, index) if index * group.block_tokens < filled else b""
                    yield _Block(number, index, is_full, digest)

    def _found(self, blocks: Iterable[_Block]) -> list[int | None]:
        """In which slots they are already."""
        return [self._pool.find(block.group, block.digest) if block.is_full else None for block in blocks]

    def _give(self, request: Request, blocks: Sequence[_Block], found: Sequence[int | None]) -> list[BlockCopy]:
        """Makes a request's tables in the pool of what was found there and of fresh slots; returns what is to be
        loaded into these. There must be enough."""
        self._pool.reuse([slot for slot in found if slot is not None])
        fresh = iter(self._take(found.count(None)))
        request.pool_tables = [[NO_SLOT] * len(table) for table in request.tables]
        loads = []
        for block, known in zip(blocks, found):
            slot = request.pool_tables[block.group][block.place] = next(fresh) if known is None else known
            if block.digest and known is None:
                arena_slot = request.tables[block.group][block.place]
                loads.append(BlockCopy(slot, arena_slot, block.group, block.digest, block.is_full))
        return loads

    def _take_in(self, loads: Sequence[BlockCopy]) -> None:
        """These are what they are called: they can be found."""
        full = [move for move in loads if move.is_full]
        for move in full:
            self._pool.seal(move.pool_slot, move.group, move.digest)
        self._publish(full)

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
                self._store(BlockCopy(table[block], request.tables[number][block], number, digest, is_full=False))

    def _store(self, move: BlockCopy) -> None:
        # Its slot is nobody else's until it is stored, also where the request gives it back before.
        self._pool.share((move.pool_slot,))
        self._stores.append(move)

    def _take(self, count: int) -> list[int]:
        slots = self._pool.take(count)
        if self._directory is not None:
            self._directory.withdraw(slots)
        return slots

    def _publish(self, moves: Iterable[BlockCopy]) -> None:
        """Nobody writes to these blocks from now on, until they are taken by somebody else."""
        if self._directory is not None:
            self._directory.publish(moves)

    def _give_back(self, slots: Sequence[int]) -> None:
        self._pool.give_back(slots)
        self._refused = None

    def _give_back_all(self, request: Request) -> None:
        assert request.pool_tables is not None
        self._give_back(slots_tail_first(self._groups, request.pool_tables))
        request.pool_tables = None

    def _submit(self, copies: CopyBatch) -> None:
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
