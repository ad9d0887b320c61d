"""The source's side of a handoff to another host: which blocks of a lease are complete, as they become so.

To the ledger the reader is what a decode worker is on one host: it adopts the lease once it is filled, renews it, and
releases it when all blocks have been read. Until then the lease is the prefill worker's, and only blocks that it has
sealed are named: their content never changes again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.core.kv_layout import NO_SLOT, KVGroup, KVLayout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.lease import TRANSFER, Lease, State, prefix_key
from paceline.services.kvtransfer.ledger import Ledger
from paceline.services.kvtransfer.transport import ArenaMemory

ALIVE_SECONDS = 1.0
"""Something is said at least this often, so that silence is a failure."""
_DIGESTED_BYTES = 32 << 20
"""Of the blocks of one message: their digests are taken in one go, and nobody else is served meanwhile."""

Write = Callable[[pb.ExportEvent], Awaitable[None]]


def digest_of(block: memoryview) -> bytes:
    """XXH3-128 of a slot's bytes. It finds damage and what was overwritten, not malice: hosts trust each other."""
    return xxhash.xxh3_128_digest(block)


@dataclass(slots=True)
class _Reading:
    """One export."""

    key: Key
    change: asyncio.Event = field(default_factory=asyncio.Event)
    """An operation may have completed blocks, or ended the lease."""
    adopted: Lease | None = None


class Exports:
    """Tells services of other hosts what they may read from this arena.

    Args:
        clock: that of the ledger, in seconds.
        offer: how the arena can be read, by name of transport.
    """

    def __init__(
        self, layout: KVLayout, ledger: Ledger, memory: ArenaMemory, clock: Callable[[], float], offer: pb.Offer
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._memory = memory
        self._clock = clock
        self._offer = offer
        self._readings: dict[tuple[str, int], _Reading] = {}
        """By request and attempt."""
        self._most_blocks = max(1, _DIGESTED_BYTES // layout.slot_bytes)

    def note(self, key: Key) -> None:
        """Blocks of this lease may have become complete, or it may have ended."""
        if reading := self._readings.get(key[:2]):
            reading.change.set()

    async def run(self, key: Key, cached_tokens: int, write: Write) -> None:
        """Names blocks until the reader ends the call, which cancels this.

        Args:
            cached_tokens: at the front, which the reader has.

        Raises:
            InvalidRequestError: this cannot be exported, or is being exported.
            StaleError: the lease has ended.
        """
        self._check_aligned(cached_tokens)
        if key[:2] in self._readings:
            raise InvalidRequestError(f"lease {key} is being exported already")
        cursor = Cursor(self._layout.groups, cached_tokens)
        reading = self._readings[key[:2]] = _Reading(key)
        keeper = asyncio.create_task(self._keep(reading), name="export lease")
        try:
            await write(pb.ExportEvent(offer=self._offer))
            while (adopted := self._take_over(reading)) is None:
                reading.change.clear()
                lease = self._ledger.find(key, self._clock())
                await self._name(lease, cursor.sealed(lease, self._ledger.hash_of), write)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_SECONDS):
                        await reading.change.wait()
            await self._name(adopted, cursor.rest(adopted, self._ledger.hash_of), write, last=True)
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                self._take_over(reading)
                await write(pb.ExportEvent(exported=pb.Exported()))
        finally:
            # Nothing is awaited here: a second cancellation would leave the rest undone.
            keeper.cancel()
            del self._readings[key[:2]]
            if reading.adopted is not None:
                with contextlib.suppress(PacelineError):
                    self._ledger.release(TRANSFER, reading.adopted.key, self._clock())

    async def run_prefix(self, key: Key, hashes: Sequence[bytes], cached_tokens: int, write: Write) -> None:
        """Names the cached blocks of the longest known prefix of a context, which may be none, until the reader ends
        the call, which cancels this. They are held meanwhile, so that none is evicted.

        Args:
            key: of the request for which it is brought over.
            cached_tokens: see `run`.

        Raises:
            InvalidRequestError: this cannot be exported, or is being exported.
            StaleError: it has been exported.
        """
        self._check_aligned(cached_tokens)
        lease = self._ledger.pin(TRANSFER, prefix_key(key), hashes, self._clock())
        try:
            await write(pb.ExportEvent(offer=self._offer))
            cursor = Cursor(self._layout.groups, min(cached_tokens, lease.filled_tokens))
            await self._name(lease, cursor.rest(lease, self._ledger.hash_of), write, last=True)
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                self._ledger.renew(TRANSFER, lease.key, self._clock())
                await write(pb.ExportEvent(exported=pb.Exported()))
        finally:
            with contextlib.suppress(PacelineError):
                self._ledger.release(TRANSFER, lease.key, self._clock())

    def _check_aligned(self, cached_tokens: int) -> None:
        if cached_tokens % self._layout.alignment:
            raise InvalidRequestError(f"cached_tokens must be a multiple of {self._layout.alignment}")

    def _take_over(self, reading: _Reading) -> Lease | None:
        """Adopt the lease once it is filled, and renew it from then on. Raises what `run` does."""
        now = self._clock()
        if reading.adopted is not None:
            return self._ledger.renew(TRANSFER, reading.adopted.key, now)
        lease = self._ledger.find(reading.key, now)
        if lease.state is State.FILLED:
            reading.adopted = self._ledger.adopt(TRANSFER, lease.key, now)
        elif lease.state is not State.FILLING:
            raise InvalidRequestError(f"lease {lease.key} is {lease.state.value}; nobody computes a prompt in it")
        return reading.adopted

    async def _keep(self, reading: _Reading) -> None:
        """Nobody else renews a filled lease, and a slow reader keeps `run` waiting for longer than a lease."""
        with contextlib.suppress(PacelineError):  # which `run` meets, too
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                self._take_over(reading)

    async def _name(self, lease: Lease, blocks: Iterator[pb.ExportedBlock], write: Write, last: bool = False) -> None:
        """Writes these blocks with their digests; without any too, to say that all is well."""
        found = list(blocks)
        while True:
            part, found = found[: self._most_blocks], found[self._most_blocks :]
            # In between others may have ended the lease, and its slots may be somebody else's.
            self._ledger.find(lease.key, self._clock())
            for block in part:
                block.digest = digest_of(self._memory.slot(block.slot))
            exported = pb.Exported(blocks=part)
            if last and not found:
                exported.filled_tokens, exported.context_hash = lease.filled_tokens, lease.context_hash
            await write(pb.ExportEvent(exported=exported))
            if not found:
                return


class Cursor:
    """How far each group's blocks have been named.

    Blocks before `cached_tokens` and those that no query behind the context reads are left out.
    """

    def __init__(self, groups: Sequence[KVGroup], cached_tokens: int) -> None:
        self._groups = groups
        self._next = [cached_tokens // group.block_tokens for group in groups]

    def sealed(self, lease: Lease, hash_of: Callable[[int], bytes | None]) -> Iterator[pb.ExportedBlock]:
        """Blocks that have been sealed since; each group's in order."""
        return self._take(lease, lease.token_count, hash_of, only_sealed=True)

    def rest(self, lease: Lease, hash_of: Callable[[int], bytes | None]) -> Iterator[pb.ExportedBlock]:
        """All that is left of a filled lease."""
        return self._take(lease, lease.filled_tokens, hash_of, only_sealed=False)

    def _take(
        self, lease: Lease, tokens: int, hash_of: Callable[[int], bytes | None], only_sealed: bool
    ) -> Iterator[pb.ExportedBlock]:
        for number, (group, table) in enumerate(zip(self._groups, lease.tables)):
            index = max(self._next[number], group.first_needed_block(tokens))
            while index < group.blocks_for(tokens):
                slot = table[index]
                name = None if slot == NO_SLOT else hash_of(slot)
                if slot == NO_SLOT or (only_sealed and name is None):
                    break
                yield pb.ExportedBlock(group=number, index=index, slot=slot, hash=name or b"")
                index += 1
            self._next[number] = index
