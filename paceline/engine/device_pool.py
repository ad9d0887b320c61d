"""A device's own pool of blocks above the host's arena. Pure, like the scheduler; see `compute_pool`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.block_counts import Counts
from paceline.core.block_pool import BlockPool
from paceline.core.context import Tail
from paceline.core.kv_layout import NO_SLOT, KVLayout, slots_tail_first
from paceline.engine.compute_pool import CopyBatch
from paceline.engine.pool_directory import BlockCopy, PoolDirectory
from paceline.engine.request import LEAVING, Request, Residence
from paceline.engine.step import Event

_WEIGHT = 0.1
"""Weight of a new value in an average."""

_TELLING_LOADS = 4
"""Least number of blocks in a batch from which the time to load one block is measured."""


class DevicePool:
    """A pool of `slots` slots on the device.

    Full blocks stay in the pool after their request has left, until their slots are needed. A later request that needs
    such a block does not have to load it.

    Args:
        directory: tells other processes which blocks are in the pool; None if no other process can read the pool.
    """

    def __init__(self, layout: KVLayout, slots: int, directory: PoolDirectory | None = None) -> None:
        self._directory = directory
        self._groups = layout.groups
        self._pool = BlockPool(slots, len(layout.groups))
        self._held: dict[Request, _HeldBlocks] = {}
        self._copies: list[CopyBatch] = []
        self._refused: Request | None = None
        """The last request that found too few free slots; None if slots have become free since."""
        self._stores: list[BlockCopy] = []
        """Copies into the arena, of blocks that were sealed since the last `hold_until_stored`."""
        self._block_seconds = 0.0
        """Average time to load a block; 0 if unknown."""

    def tables(self, request: Request) -> list[list[int]]:
        return self._held[request].tables

    def is_copying(self, request: Request) -> bool:
        held = self._held.get(request)
        return held is not None and held.copies > 0

    def admit(self, request: Request, tokens_per_second: float) -> bool:
        if request is self._refused:
            return False  # another search would take long with a long context, and find nothing new
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
        copies = CopyBatch(request, loads=self._give_tables(request, blocks, found))
        if copies.loads:
            self._submit(copies)
        return True

    def extend(self, request: Request) -> bool:
        tables = self.tables(request)
        missing = [len(there) - len(here) for there, here in zip(request.tables, tables)]
        if sum(missing) > self._pool.available():
            return False
        fresh = self._take_slots(sum(missing))
        for table, count in zip(tables, missing):
            table += fresh[:count]
            del fresh[:count]
        return True

    def note_sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        for block, digest in enumerate(hashes, first_block):
            slot = self.tables(request)[group][block]
            self._pool.seal(slot, group, digest)
            self._store(BlockCopy(slot, request.tables[group][block], group, digest))

    def note_trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        table = self.tables(request)[group]
        self._give_back([slot for slot in table[:first_kept_block] if slot != NO_SLOT])
        table[:first_kept_block] = [NO_SLOT] * first_kept_block

    def hold_until_stored(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        if whole:
            self._store_partial(request)
        if not self._stores and not self.is_copying(request):
            return events
        if self._stores or events:
            self._submit(CopyBatch(request, stores=self._stores, events=events))
            self._stores = []
        return []

    def copy_tail(self, request: Request) -> tuple[tuple[int, int], ...]:
        partial = request.partial_blocks(request.kept_len)
        if len(partial) > self._pool.available():
            return ()
        held = self._held[request]
        held.tail = self._take_slots(len(partial))
        return tuple((held.tables[group][block], slot) for (group, block), slot in zip(partial, held.tail))

    def store_tail(self, request: Request, tail: Tail) -> None:
        for slot, (group, _) in zip(self._held[request].tail, request.partial_blocks(tail.length)):
            self._store(BlockCopy(slot, request.spare[group], group, tail.name, is_full=False))
        self.drop_tail(request)

    def drop_tail(self, request: Request) -> None:
        held = self._held[request]
        self._give_back(held.tail)
        held.tail = []

    def release(self, request: Request) -> None:
        if request in self._held:
            self.drop_tail(request)
            self._give_back(slots_tail_first(self._groups, self._held.pop(request).tables))

    def take_copies(self) -> list[CopyBatch]:
        copies, self._copies = self._copies, []
        return copies

    def finish_copies(self, copies: CopyBatch, seconds: float) -> list[Event]:
        self._held[copies.request].copies -= 1
        self._publish(copies.stores)
        self._give_back([move.pool_slot for move in copies.stores])
        if len(copies.loads) >= _TELLING_LOADS:
            self._block_seconds = _average(self._block_seconds, seconds / len(copies.loads))
        self._seal_loaded(copies.loads)
        return copies.events

    def forget(self) -> int:
        slots = self._pool.forget()
        if self._directory is not None:
            self._directory.withdraw(slots)
        self._refused = None
        return len(slots)

    def counts(self) -> Counts | None:
        return self._pool.counts()

    def check(self, requests: Collection[Request]) -> list[str]:
        wrong = [f"{request.key} holds blocks, but is not here" for request in self._held.keys() - set(requests)]
        for request in requests:
            if request.place not in LEAVING and (request.place is Residence.WAITING) == (request in self._held):
                wrong.append(f"{request.key} is {request.place.name}, which does not fit its blocks in the pool")
        if self._stores or any(held.copies for held in self._held.values()):
            return wrong  # only the batches of stores know their references
        slots = [slot for held in self._held.values() for table in (*held.tables, held.tail) for slot in table]
        references, total = Counter(slots), self._pool.counts().total
        return wrong + self._pool.check([references[slot] for slot in range(total)], [0] * total)

    def _needed(self, request: Request) -> Iterator[_Block]:
        """Yield the blocks that a request needs to continue."""
        for number, (group, table) in enumerate(zip(self._groups, request.tables)):
            filled = request.filled_len(number)
            for index in range(group.first_needed_block(filled), len(table)):
                if table[index] != NO_SLOT:
                    is_full = (index + 1) * group.block_tokens <= filled
                    digest = request.hash_of(number, index) if index * group.block_tokens < filled else b""
                    yield _Block(number, index, is_full, digest)

    def _found(self, blocks: Iterable[_Block]) -> list[int | None]:
        """Return for each block the slot of the pool that has it already, or None."""
        return [self._pool.find(block.group, block.digest) if block.is_full else None for block in blocks]

    def _give_tables(self, request: Request, blocks: Sequence[_Block], found: Sequence[int | None]) -> list[BlockCopy]:
        """Make a request's tables in the pool from found slots and fresh ones. Return the loads into the fresh ones.

        The caller has made sure that enough slots are free.
        """
        self._pool.reuse([slot for slot in found if slot is not None])
        fresh = iter(self._take_slots(found.count(None)))
        tables = [[NO_SLOT] * len(table) for table in request.tables]
        self._held[request] = _HeldBlocks(tables)
        loads = []
        for block, known in zip(blocks, found):
            slot = tables[block.group][block.place] = next(fresh) if known is None else known
            if block.digest and known is None:
                arena_slot = request.tables[block.group][block.place]
                loads.append(BlockCopy(slot, arena_slot, block.group, block.digest, block.is_full))
        return loads

    def _seal_loaded(self, loads: Sequence[BlockCopy]) -> None:
        """Seal blocks that were loaded. From now on other requests find them."""
        full = [move for move in loads if move.is_full]
        for move in full:
            self._pool.seal(move.pool_slot, move.group, move.digest)
        self._publish(full)

    def _is_cheaper_computed(self, request: Request, loads: int, tokens_per_second: float) -> bool:
        """Return whether computing the context again is faster than loading `loads` blocks."""
        if any(group.shape.window for group in self._groups) or request.sampling.prompt_logprobs is not None:
            return False  # the request has no blocks before a window any more, or would report logprobs twice
        if request.context.media:
            return False  # the request may have given back its encodings
        if request.computed_len >= loads * self._block_seconds * tokens_per_second:
            return False
        # While requests compute instead, no load is measured. The estimate sinks, so that loads are tried again.
        self._block_seconds *= 1 - _WEIGHT
        return True

    def _store_partial(self, request: Request) -> None:
        for number, (group, table) in enumerate(zip(self._groups, self.tables(request))):
            block, rest = divmod(request.filled_len(number), group.block_tokens)
            # A sealed block is complete in the arena, and others read it. Here it is being computed again.
            if rest and block >= request.sealed_blocks[number]:
                digest = request.hash_of(number, block)
                self._store(BlockCopy(table[block], request.tables[number][block], number, digest, is_full=False))

    def _store(self, move: BlockCopy) -> None:
        # Keep the slot until the block is stored, even if the request gives it back before.
        self._pool.share((move.pool_slot,))
        self._stores.append(move)

    def _take_slots(self, count: int) -> list[int]:
        slots = self._pool.take(count)
        if self._directory is not None:
            self._directory.withdraw(slots)
        return slots

    def _publish(self, moves: Iterable[BlockCopy]) -> None:
        """Tell other processes of these blocks, which do not change until their slots are taken again."""
        if self._directory is not None:
            self._directory.publish(moves)

    def _give_back(self, slots: Sequence[int]) -> None:
        self._pool.give_back(slots)
        self._refused = None

    def _submit(self, copies: CopyBatch) -> None:
        self._held[copies.request].copies += 1
        self._copies.append(copies)


@dataclass(slots=True)
class _HeldBlocks:
    """The slots of one request in the pool."""

    tables: list[list[int]]
    """[groups][blocks]: slots of the pool; NO_SLOT for a block that is not needed."""
    tail: list[int] = field(default_factory=list)
    """Slots with copies of the blocks at `Request.kept_len`, until the copies are stored in `Request.spare`."""
    copies: int = 0
    """Number of batches of this request that are being copied into the pool or out of it."""


class _Block(NamedTuple):
    group: int
    place: int
    is_full: bool
    digest: bytes
    """Name of the block's content; empty if it has none."""


def _average(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
