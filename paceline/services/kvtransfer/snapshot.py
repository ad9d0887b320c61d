"""The state of a host's KV memory, for load reports and metrics."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from paceline.core.block_counts import Counts
from paceline.core.cache_policy.base import HintCounts
from paceline.core.metrics import Family, Sample
from paceline.proto.fleet_pb2 import HostReport
from paceline.services.kvtransfer.host_memory import HostMemory
from paceline.services.kvtransfer.ledger.owners import Lookups
from paceline.services.kvtransfer.transfers.fetches import Totals

ENCODING_QUERIES = Family(
    "encoding_cache_queries", "Rows of encodings looked up in the cache before an encoder runs", has_role=False
)
ENCODING_HITS = Family("encoding_cache_hits", "Rows of encodings found in the cache", has_role=False)
REUSABLE_BYTES = Family(
    "kv_reusable_bytes", "Bytes of the blocks that requests can reuse, by group", "gauge", has_role=False
)


@dataclasses.dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The state of a host's KV memory, for load reports and metrics."""

    counts: Counts = Counts(0, 0, 0, 0, 0)
    """Numbers of blocks by state. All are 0 before the first worker has attached."""
    slot_bytes: int = 0
    fingerprint: str = ""
    """Fingerprint of the KV layout; empty before the first worker has attached."""
    workers: int = 0
    leases: int = 0
    expired_leases: int = 0
    evicted_blocks: int = 0
    block_events: int = 0
    """Number of block events so far, which is also the number of the next event."""
    token_bytes: float = 0.0
    """Bytes that one token of a context takes in all KV groups together."""
    prefixes: Lookups = dataclasses.field(default_factory=Lookups)
    encodings: Lookups = dataclasses.field(default_factory=Lookups)
    reusable: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of blocks that can be reused, by the name of their group."""
    hints: HintCounts = dataclasses.field(default_factory=HintCounts)
    transfers: Totals = dataclasses.field(default_factory=Totals)
    """Totals of the transfers from other hosts so far."""
    disk: Sequence[Sample] = ()
    """Counters of the disk tier; empty without one."""

    def report(self) -> HostReport:
        """Return the report by which gateways place requests and follow the cache."""
        return HostReport(
            next_block_event=self.block_events,
            fetched_bytes=self.transfers.bytes,
            fetch_seconds=self.transfers.read_seconds,
            token_bytes=self.token_bytes,
            blocks=self.counts.total,
            used_blocks=self.counts.held + self.counts.in_flight,
            kv_tokens=int(self.counts.total * self.slot_bytes / self.token_bytes) if self.token_bytes else 0,
        )

    def samples(self) -> Iterator[Sample]:
        """Yield every value of the snapshot as a metric."""
        yield from self.counts.samples()
        yield Sample("slot_bytes", self.slot_bytes)
        yield Sample("leases", self.leases)
        yield Sample("expired_leases", self.expired_leases)
        yield Sample("evicted_blocks", self.evicted_blocks)
        yield Sample("block_events", self.block_events)
        yield Sample("token_bytes", self.token_bytes)
        yield Sample("prefix_queries_tokens", self.prefixes.queried_tokens)
        yield Sample("prefix_hits_tokens", self.prefixes.cached_tokens)
        yield Sample("encoding_queries_rows", self.encodings.queried_tokens, ENCODING_QUERIES)
        yield Sample("encoding_hits_rows", self.encodings.cached_tokens, ENCODING_HITS)
        for group, blocks in self.reusable.items():
            yield Sample(f"reusable_bytes_{group}", blocks * self.slot_bytes, REUSABLE_BYTES, {"group": group})
        yield Sample("hinted_blocks", self.hints.hinted)
        yield Sample("hinted_kept_blocks", self.hints.kept)
        yield Sample("hinted_wasted_blocks", self.hints.wasted)
        yield from self.transfers.samples()
        yield from self.disk


def snapshot_of(memory: HostMemory, workers: int) -> MemorySnapshot:
    """Return the present state of `memory`, to which `workers` workers are attached."""
    ledger, layout = memory.ledger, memory.layout
    reusable = Counter[str]()
    for group, blocks in zip(layout.all_groups, ledger.reusable_counts()):
        reusable[group.shape.name] += blocks  # a group of a draft model may have the same name
    return MemorySnapshot(
        counts=ledger.counts(),
        slot_bytes=layout.slot_bytes,
        fingerprint=layout.fingerprint,
        workers=workers,
        leases=len(ledger.leases()),
        expired_leases=ledger.expired_leases,
        evicted_blocks=ledger.evicted_blocks,
        block_events=ledger.event_count,
        token_bytes=layout.token_bytes,
        prefixes=ledger.lookups[False],
        encodings=ledger.lookups[True],
        reusable=reusable,
        hints=ledger.hint_counts,
        transfers=memory.fetches.totals,
        disk=() if memory.disk is None else tuple(memory.disk.samples()),
    )
