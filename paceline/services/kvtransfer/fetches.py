"""The destination's side of a handoff between hosts: blocks of a prompt are pulled while it is being computed.

To the ledger this service is what a prefill worker is on one host: it opens the reserved lease, writes its blocks,
seals and fills it. The source names blocks as they become complete (`exports`), so that only the last ones are waited
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc.aio

from paceline.core.errors import PacelineError, TransferError, UnavailableError
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.core.metrics import Family, Sample
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.rpc import heeding_cancellation, unmapped_error
from paceline.services.common.wire import key_to_pb
from paceline.services.kvtransfer.arrivals import Arrivals, check_names
from paceline.services.kvtransfer.channels import Channels
from paceline.services.kvtransfer.exports import digest_of
from paceline.services.kvtransfer.lease import TRANSFER, Lease, prefix_key
from paceline.services.kvtransfer.ledger import Ledger
from paceline.services.kvtransfer.paths import Paths
from paceline.services.kvtransfer.transport import ArenaMemory

TRANSFERS = Family("kv_transfers", "Prompts whose KV blocks came from another host", has_role=False)
TRANSFER_FAILURES = Family("kv_transfer_failures", "Transfers between hosts that failed", has_role=False)
TRANSFER_BYTES = Family("kv_transfer_bytes", "Bytes of KV blocks that came from other hosts", has_role=False)
TRANSFER_SECONDS = Family(
    "kv_transfer_read_seconds", "Seconds in which blocks were read from other hosts", has_role=False
)

SILENCE_SECONDS = 5.0
"""The source says something every second."""

Call = (
    grpc.aio.UnaryStreamCall[pb.ExportRequest, pb.ExportEvent]
    | grpc.aio.UnaryStreamCall[pb.ExportPrefixRequest, pb.ExportEvent]
)


@dataclass(slots=True)
class Totals:
    """What was brought over so far, for metrics."""

    transfers: Counter[str] = field(default_factory=Counter)
    """By path; without one, those that had no block to move."""
    failures: int = 0
    """Without those that were cancelled."""
    bytes: int = 0
    read_seconds: float = 0.0
    """Spent on reading and verifying; most of it while the prompt was being computed."""

    def samples(self) -> Iterator[Sample]:
        """Yield the totals for metrics."""
        yield Sample("transfer_failures", self.failures, TRANSFER_FAILURES)
        yield Sample("transfer_bytes", self.bytes, TRANSFER_BYTES)
        yield Sample("transfer_read_seconds", self.read_seconds, TRANSFER_SECONDS)
        for path, count in self.transfers.items():
            name = path or "empty"
            yield Sample(f"transfers_{name}", count, TRANSFERS, {"path": name})


class Fetches:
    """Brings prompts from other hosts into leases of this one.

    Args:
        clock: that of the ledger, in seconds.
        on_change: is called with the key of a lease that was filled or has ended.
    """

    def __init__(
        self,
        layout: KVLayout,
        ledger: Ledger,
        memory: ArenaMemory,
        clock: Callable[[], float],
        channels: Channels,
        paths: Paths,
        on_change: Callable[[Key], None],
    ) -> None:
        self.totals = Totals()
        self._layout = layout
        self._ledger = ledger
        self._memory = memory
        self._clock = clock
        self._channels = channels
        self._paths = paths
        self._on_change = on_change

    async def run(self, session: int, key: Key, source: str, source_key: Key) -> pb.FetchReply:
        """Fills the lease, which ends where that fails.

        Args:
            session: of the worker that reserved it.
            source: address of the service that exports `source_key`.

        Raises:
            StaleError: the lease is not, or not any more, this worker's.
            TransferError: the blocks could not be brought over.
        """
        self._ledger.renew(session, key, self._clock())
        lease = self._ledger.open(TRANSFER, key, self._clock())
        request = pb.ExportRequest(
            fingerprint=self._layout.fingerprint, key=key_to_pb(source_key), cached_tokens=lease.filled_tokens
        )
        try:
            with self._channels.to(source) as channel:
                call = pb_grpc.KVTransferStub(channel).Export(request)
                reply, last = await self._bring(lease, call, source)
            self._trim(lease, last.filled_tokens)
            self._ledger.fill(TRANSFER, lease.key, last.filled_tokens, self._clock(), last.context_hash)
        except BaseException as error:
            with contextlib.suppress(PacelineError):
                self._ledger.release(TRANSFER, lease.key, self._clock())
            if isinstance(error, PacelineError):
                self.totals.failures += 1
                raise TransferError(f"{key} could not be brought over from {source}: {error}") from error
            raise
        finally:
            self._on_change(key)
        self._count(reply)
        return reply

    async def run_prefix(self, key: Key, source: str, hashes: Sequence[bytes]) -> pb.FetchReply:
        """Brings into this host's cache what another one has cached of a context, as far as it lacks here.

        It comes into a lease of this service's own, which ends with this: what was sealed is cached then.

        Args:
            key: of the request for which it is brought over.
            source: address of the service that has it.
            hashes: chain of the context, no more of it than can be reused.

        Raises:
            BusyError: there are no blocks to bring it into.
            TransferError: the blocks could not be brought over.
        """
        tokens = len(hashes) * BASE_TOKENS
        lease = self._ledger.reserve(TRANSFER, prefix_key(key), hashes, tokens, tokens, self._clock())
        request = pb.ExportPrefixRequest(
            fingerprint=self._layout.fingerprint, key=key_to_pb(key), cached_tokens=lease.filled_tokens, hashes=hashes
        )
        try:
            with self._channels.to(source) as channel:
                call = pb_grpc.KVTransferStub(channel).ExportPrefix(request)
                reply, _ = await self._bring(lease, call, source, hashes)
        except PacelineError as error:
            self.totals.failures += 1
            raise TransferError(f"the prefix of {key} could not be brought over from {source}: {error}") from error
        finally:
            with contextlib.suppress(PacelineError):
                self._ledger.release(TRANSFER, lease.key, self._clock())
        self._count(reply)
        return reply

    def _trim(self, lease: Lease, filled_tokens: int) -> None:
        """Gives back blocks that have not been brought because no query behind the prompt sees them."""
        for number, group in enumerate(self._layout.groups):
            if first_needed := group.first_needed_block(filled_tokens):
                self._ledger.trim(TRANSFER, lease.key, number, first_needed, self._clock())

    def _count(self, reply: pb.FetchReply) -> None:
        totals = self.totals
        totals.transfers[reply.path] += 1
        totals.bytes += reply.bytes
        totals.read_seconds += reply.read_ms / 1000

    async def _bring(
        self, lease: Lease, call: Call, source: str, hashes: Sequence[bytes] | None = None
    ) -> tuple[pb.FetchReply, pb.Exported]:
        """Pulls all blocks that the source names; returns its last word, too.

        Args:
            hashes: what the blocks have to be called, where that is known.
        """
        arrivals = Arrivals(self._layout.groups, lease)
        reply = pb.FetchReply()
        read_seconds = 0.0
        try:
            offer = (await _next(call, "offer")).offer
            while True:
                exported = (await _next(call, "exported")).exported
                named = time.monotonic()
                if exported.blocks:
                    if hashes is not None:
                        check_names(self._layout.groups, exported.blocks, hashes)
                    reply.path = await self._read(offer, source, exported.blocks, arrivals)
                    self._seal(lease.key, exported.blocks)
                read_seconds += time.monotonic() - named
                reply.blocks += len(exported.blocks)
                if exported.HasField("filled_tokens"):
                    arrivals.check_all(exported.filled_tokens)
                    reply.bytes = reply.blocks * self._layout.slot_bytes
                    reply.read_ms = round(read_seconds * 1000)
                    return reply, exported
        except grpc.aio.AioRpcError as error:
            raise unmapped_error(error, f"kvtransfer at {source}") from error
        finally:
            call.cancel()

    async def _read(self, offer: pb.Offer, source: str, blocks: Sequence[pb.ExportedBlock], arrivals: Arrivals) -> str:
        """Pulls and verifies blocks; returns the name of the path."""
        places = arrivals.places(blocks)

        def damaged() -> int:
            return sum(digest_of(self._memory.slot(here)) != block.digest for block, here in zip(blocks, places))

        slots = [(block.slot, here) for block, here in zip(blocks, places)]
        return await self._paths.read(offer, source, slots, damaged)

    def _seal(self, key: Key, blocks: Sequence[pb.ExportedBlock]) -> None:
        """Publishes those that have a name, one call for each run of neighbours."""
        named = [(place, block) for place, block in enumerate(blocks) if block.hash]
        # Within a run of neighbours the index grows as fast as the place in the message.
        for _, run in itertools.groupby(named, lambda entry: (entry[1].group, entry[1].index - entry[0])):
            first, *others = (block for _, block in run)
            hashes = [block.hash for block in (first, *others)]
            self._ledger.seal(TRANSFER, key, first.group, first.index, hashes, self._clock())


async def _next(call: Call, expected: str) -> pb.ExportEvent:
    """What the source says next. Raises UnavailableError where it is nothing, or not what is expected."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            event = await heeding_cancellation(call.read())
    except TimeoutError:
        raise UnavailableError(f"it was silent for {SILENCE_SECONDS:g} seconds") from None
    if not isinstance(event, pb.ExportEvent) or event.WhichOneof("event") != expected:
        raise UnavailableError(f"it ended the call, or said something else, where {expected} was to come")
    return event
