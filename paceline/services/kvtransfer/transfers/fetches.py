"""The destination's side of a handoff between hosts: it reads a prompt's blocks while the prompt is being computed.

In the ledger, this service takes the part of a prefill worker on the same host. It opens the reserved lease, writes and
seals its blocks, and fills it. The source names blocks as they become complete (`exports`). So after the prompt is
computed only its last blocks have to be read.
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
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.tasks import heeding_cancellation
from paceline.services.common.wire import key_to_pb
from paceline.services.common.wire_version import WireVersions, mismatch
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, prefix_key
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transfers.arrivals import Arrivals, check_names
from paceline.services.kvtransfer.transfers.exports import digest_of
from paceline.services.kvtransfer.transports.grpc_transport import Channels
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Paths

TRANSFERS = Family("kv_transfers", "Prompts whose KV blocks came from another host", has_role=False)
TRANSFER_FAILURES = Family("kv_transfer_failures", "Transfers between hosts that failed", has_role=False)
TRANSFER_BYTES = Family("kv_transfer_bytes", "Bytes of KV blocks that came from other hosts", has_role=False)
TRANSFER_SECONDS = Family(
    "kv_transfer_read_seconds", "Seconds spent on reading and verifying blocks of other hosts", has_role=False
)

SILENCE_SECONDS = 5.0
"""Seconds without a message after which a source has failed. A source sends one every second."""

Call = (
    grpc.aio.UnaryStreamCall[pb.ExportRequest, pb.ExportEvent]
    | grpc.aio.UnaryStreamCall[pb.ExportPrefixRequest, pb.ExportEvent]
)


@dataclass(slots=True)
class Totals:
    """Totals of the transfers from other hosts so far, for metrics."""

    transfers: Counter[str] = field(default_factory=Counter)
    """Number of transfers by transport; under "", transfers without any block to move."""
    failures: int = 0
    """Number of failed transfers, without cancelled ones."""
    bytes: int = 0
    read_seconds: float = 0.0
    """Seconds spent on reading and verifying blocks, mostly while the prompt was still being computed."""

    def samples(self) -> Iterator[Sample]:
        """Yield the numbers of transfers and failures, the moved bytes and the seconds, for metrics."""
        yield Sample("transfer_failures", self.failures, TRANSFER_FAILURES)
        yield Sample("transfer_bytes", self.bytes, TRANSFER_BYTES)
        yield Sample("transfer_read_seconds", self.read_seconds, TRANSFER_SECONDS)
        for path, count in self.transfers.items():
            name = path or "empty"
            yield Sample(f"transfers_{name}", count, TRANSFERS, {"path": name})


class Fetches:
    """Reads the blocks of prompts from other hosts into leases of this host.

    Args:
        clock: the ledger's clock, in seconds.
        on_change: called with the key of each lease that was filled or has ended.
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
        """Fill a reserved lease with the blocks of a lease on another host. If this fails, the reserved lease ends.

        Args:
            session: session of the worker that reserved the lease.
            key: key of the reserved lease.
            source: address of the service that exports `source_key`.
            source_key: key of the lease on the other host.

        Raises:
            StaleError: the lease does not exist or belongs to another worker.
            TransferError: the blocks could not be read.
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
                raise TransferError(f"{key} could not be fetched from {source}: {error}") from error
            raise
        finally:
            self._on_change(key)
        self._count(reply)
        return reply

    async def run_prefix(self, key: Key, source: str, hashes: Sequence[bytes], encoding: bool = False) -> pb.FetchReply:
        """Bring a context's blocks from another host into this host's cache: blocks that the other host has and this
        host lacks.

        The blocks go into a lease of this service, which ends with this call. Its sealed blocks stay cached.

        Args:
            key: key of the request that waits for the prefix.
            source: address of the service that has the prefix.
            hashes: chain of the part of the context that may be reused, one hash for each BASE_TOKENS tokens.
            encoding: whether the context is an encoding.

        Raises:
            BusyError: too few blocks are available here.
            TransferError: the blocks could not be read.
        """
        tokens = len(hashes) * BASE_TOKENS
        now = self._clock()
        lease = self._ledger.reserve(TRANSFER, prefix_key(key), hashes, tokens, tokens, now, encoding=encoding)
        request = pb.ExportPrefixRequest(
            fingerprint=self._layout.fingerprint,
            key=key_to_pb(key),
            cached_tokens=lease.filled_tokens,
            hashes=hashes,
            encoding=encoding,
        )
        try:
            with self._channels.to(source) as channel:
                call = pb_grpc.KVTransferStub(channel).ExportPrefix(request)
                reply, _ = await self._bring(lease, call, source, hashes)
        except PacelineError as error:
            self.totals.failures += 1
            raise TransferError(f"the prefix of {key} could not be fetched from {source}: {error}") from error
        finally:
            with contextlib.suppress(PacelineError):
                self._ledger.release(TRANSFER, lease.key, self._clock())
        self._count(reply)
        return reply

    def _trim(self, lease: Lease, filled_tokens: int) -> None:
        """Give back the blocks that were not read because no query after the prompt reads them."""
        for number, group in enumerate(lease.layout.groups):
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
        """Read all blocks that the source names. Return the totals and the source's last message.

        Args:
            hashes: chain of the context, to check the blocks' names; None if it is not known.
        """
        arrivals = Arrivals(lease.layout.groups, lease)
        reply = pb.FetchReply()
        read_seconds = 0.0
        try:
            offer = (await _next(call, "offer")).offer
            if problem := mismatch(f"kvtransfer at {source}", WireVersions.from_pb(offer.wire)):
                raise TransferError(problem)
            while True:
                exported = (await _next(call, "exported")).exported
                named = time.monotonic()
                if exported.blocks:
                    if hashes is not None:
                        check_names(lease.layout.groups, exported.blocks, hashes)
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
        """Read and verify blocks. Return the name of the transport."""
        places = arrivals.places(blocks)

        def damaged() -> int:
            return sum(digest_of(self._memory.slot(here)) != block.digest for block, here in zip(blocks, places))

        slots = [(block.slot, here) for block, here in zip(blocks, places)]
        return await self._paths.read(offer, source, slots, damaged)

    def _seal(self, key: Key, blocks: Sequence[pb.ExportedBlock]) -> None:
        """Seal the blocks that have a hash, with one call for each run of consecutive blocks of a group."""
        named = [(place, block) for place, block in enumerate(blocks) if block.hash]
        # In a run of consecutive blocks, the index minus the place in the message is constant.
        for _, run in itertools.groupby(named, lambda entry: (entry[1].group, entry[1].index - entry[0])):
            first, *others = (block for _, block in run)
            hashes = [block.hash for block in (first, *others)]
            self._ledger.seal(TRANSFER, key, first.group, first.index, hashes, self._clock())


async def _next(call: Call, expected: str) -> pb.ExportEvent:
    """Return the next event of the source. Raises UnavailableError if none comes in time or it is not `expected`."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            event = await heeding_cancellation(call.read())
    except TimeoutError:
        raise UnavailableError(f"the source was silent for {SILENCE_SECONDS:g} seconds") from None
    if not isinstance(event, pb.ExportEvent) or event.WhichOneof("event") != expected:
        raise UnavailableError(f"the source ended the call or sent another event instead of {expected}")
    return event
