"""The source's side of a handoff to another host: it tells the reader the names of a lease's blocks as they become
complete.

In the ledger, this service takes the part of a decode worker on the same host. It adopts the lease when it is filled,
renews it, and releases it when all blocks have been read. Until it is filled, a prefill worker writes the lease, and
only blocks that this worker has sealed are named, because their content never changes again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from paceline.core.context import Tail
from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.core.kv_layout import NO_SLOT, KVGroup, KVLayout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, State, prefix_key
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transports.transport import ArenaMemory

ALIVE_SECONDS = 1.0
"""Longest time between two messages to the reader, in seconds. A longer silence counts as a failure."""
_DIGESTED_BYTES = 32 << 20
"""Largest number of bytes of blocks in one message. The service waits while their digests are computed."""

Write = Callable[[pb.ExportEvent], Awaitable[None]]


def digest_of(block: memoryview) -> bytes:
    """Return XXH3-128 of a slot's bytes, which detects damage but not forgery: hosts trust each other."""
    return xxhash.xxh3_128_digest(block)


@dataclass(slots=True)
class _Reading:
    """An export in progress: a reader on another host reads the blocks of one lease."""

    key: Key
    change: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an operation may have completed blocks or ended the lease."""
    adopted: Lease | None = None


class Exports:
    """Names the blocks that services of other hosts may read from this arena.

    Args:
        clock: the ledger's clock, in seconds.
        offer: for each transport, the data that a reader of the arena needs.
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
        """Exports in progress, by request and attempt."""
        self._most_blocks = max(1, _DIGESTED_BYTES // layout.slot_bytes)

    def note(self, key: Key) -> None:
        """Wake the export of a lease, because blocks of the lease may be complete or the lease may have ended."""
        if reading := self._readings.get(key[:2]):
            reading.change.set()

    async def run(self, key: Key, cached_tokens: int, write: Write) -> None:
        """Name the blocks of a lease until the reader ends its call, which cancels this one.

        Args:
            key: key of the lease, in which a prefill worker computes.
            cached_tokens: number of the context's first tokens whose blocks the reader has already.
            write: sends an event to the reader.

        Raises:
            InvalidRequestError: the lease cannot be exported, or is being exported already.
            StaleError: the lease has ended.
        """
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
            # Await nothing here, because a second cancellation would skip the rest.
            keeper.cancel()
            del self._readings[key[:2]]
            if (adopted := reading.adopted) is not None:
                with contextlib.suppress(PacelineError):
                    if self._layout.keeps_tails:
                        tail = Tail(adopted.filled_tokens, adopted.context_hash)
                        self._ledger.keep(TRANSFER, adopted.key, tail, self._clock())
                with contextlib.suppress(PacelineError):
                    self._ledger.release(TRANSFER, adopted.key, self._clock())

    async def run_prefix(
        self, key: Key, hashes: Sequence[bytes], cached_tokens: int, write: Write, encoding: bool = False
    ) -> None:
        """Name the cached blocks of a context's longest cached prefix, if there is one.

        The reader ends its call, which cancels this one. Until then a lease keeps the blocks from being evicted.

        Args:
            key: key of the request for which the reader wants the prefix.
            hashes: chain of the context, one hash for each BASE_TOKENS tokens.
            cached_tokens: number of the context's first tokens whose blocks the reader has already.
            write: sends an event to the reader.
            encoding: whether the context is an encoding.

        Raises:
            InvalidRequestError: the arguments are wrong, or a prefix is being exported for this request already.
            StaleError: a prefix has been exported under this key before.
        """
        self._check_aligned(self._layout.part(encoding), cached_tokens)
        lease = self._ledger.pin(TRANSFER, prefix_key(key), hashes, self._clock(), encoding)
        try:
            await write(pb.ExportEvent(offer=self._offer))
            cursor = Cursor(lease.layout.groups, min(cached_tokens, lease.filled_tokens))
            await self._name(lease, cursor.rest(lease, self._ledger.hash_of), write, last=True)
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                self._ledger.renew(TRANSFER, lease.key, self._clock())
                await write(pb.ExportEvent(exported=pb.Exported()))
        finally:
            with contextlib.suppress(PacelineError):
                self._ledger.release(TRANSFER, lease.key, self._clock())

    def _check_aligned(self, layout: KVLayout, cached_tokens: int) -> None:
        if cached_tokens % layout.alignment:
            raise InvalidRequestError(f"cached_tokens must be a multiple of {layout.alignment}")

    def _take_over(self, reading: _Reading) -> Lease | None:
        """Adopt the lease if it is filled, or renew it if it is adopted. Return the adopted lease; None if there is
        none yet. Raises the errors of `run`.
        """
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
        """Adopt the lease, and renew it in time. `run` cannot do this while it waits for a slow reader."""
        with contextlib.suppress(PacelineError):  # `run` will raise the same error
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                self._take_over(reading)

    async def _name(self, lease: Lease, blocks: Iterator[pb.ExportedBlock], write: Write, last: bool = False) -> None:
        """Write blocks with their digests, in one or more messages, even if there is no block.

        If `last`, the last message says that the export is complete.
        """
        found = list(blocks)
        while True:
            part, found = found[: self._most_blocks], found[self._most_blocks :]
            # The lease may have ended during the last write, and its slots may belong to another lease.
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
    """The position up to which the blocks of each group have been named.

    Blocks of the first `cached_tokens` tokens, and blocks that no query after the context reads, are left out.
    """

    def __init__(self, groups: Sequence[KVGroup], cached_tokens: int) -> None:
        self._groups = groups
        self._next = [cached_tokens // group.block_tokens for group in groups]

    def sealed(self, lease: Lease, hash_of: Callable[[int], bytes | None]) -> Iterator[pb.ExportedBlock]:
        """Yield the blocks that have been sealed since the last call, in order within each group."""
        return self._take(lease, lease.token_count, hash_of, only_sealed=True)

    def rest(self, lease: Lease, hash_of: Callable[[int], bytes | None]) -> Iterator[pb.ExportedBlock]:
        """Yield all blocks of a filled lease that were not named yet."""
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
