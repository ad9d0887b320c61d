"""Shared parts of the kvtransfer tests: layouts, hash chains, and a ledger with a clock of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from paceline.core.kv_layout import GroupShape, KVGroup, KVLayout
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import Lease
from paceline.services.kvtransfer.ledger.ledger import Ledger

LEASE = 10.0
DECODE, PREFILL, OTHER = 11, 22, 33
"""Sessions of three workers."""


def make_layout(*groups: tuple[int, int], encoding_tokens: int = 0) -> KVLayout:
    """Return a layout. Each group is given as (block_tokens, window), both in tokens.

    Args:
        encoding_tokens: rows of a block of an encoding; 0 if the layout has none.
    """
    made = tuple(KVGroup(GroupShape(f"g{i}", (), 0, 0, window), tokens) for i, (tokens, window) in enumerate(groups))
    layout = KVLayout(made, itemsize=0, slot_bytes=4096, fingerprint="test")
    if not encoding_tokens:
        return layout
    group = KVGroup(GroupShape("encoding", (), 0, 0), encoding_tokens)
    return replace(layout, encodings=replace(layout, groups=(group,), first_group=len(made)))


def chain(text: str) -> list[bytes]:
    """Return the hashes of a context in which each letter stands for 16 tokens."""
    return [hashlib.md5(text[: end + 1].encode()).digest() for end in range(len(text))]


class Desk:
    """A ledger with a clock, and short forms of common calls."""

    def __init__(self, slots: int, *groups: tuple[int, int], encoding_tokens: int = 0) -> None:
        self.now = 100.0
        self.layout = make_layout(*(groups or ((16, 0),)), encoding_tokens=encoding_tokens)
        self.ledger = Ledger(self.layout, slots, LEASE)

    def reserve(
        self,
        request: str,
        context: str = "",
        tokens: int | None = None,
        *,
        cached: int = 1 << 20,
        session: int = DECODE,
        attempt: int = 1,
        generation: int = 1,
        encoding: bool = False,
    ) -> Lease:
        """Reserve a lease for `context` (see `chain`) with room for `tokens`."""
        tokens = len(context) * 16 if tokens is None else tokens
        key = Key(request, attempt, generation)
        return self.ledger.reserve(session, key, chain(context), tokens, cached, self.now, encoding=encoding)

    def seal(self, lease: Lease, context: str, session: int = DECODE) -> None:
        """Seal all blocks that `context` fills, in all groups."""
        for index, group in enumerate(lease.layout.groups):
            stride = group.block_tokens // 16
            self.ledger.seal(session, lease.key, index, 0, chain(context)[stride - 1 :: stride], self.now)

    def cache(self, request: str, context: str, encoding: bool = False) -> list[list[int]]:
        """Cache a context and return the block tables that it had."""
        lease = self.reserve(request, context, cached=0, encoding=encoding)
        tables = [list(table) for table in lease.tables]
        self.seal(lease, context)
        self.ledger.release(DECODE, lease.key, self.now)
        return tables

    def filling(self, request: str, context: str = "", tokens: int | None = None) -> Lease:
        """Return a lease that DECODE owns and PREFILL writes."""
        return self.ledger.open(PREFILL, self.reserve(request, context, tokens).key, self.now)

    def counts(self) -> tuple[int, int, int, int]:
        """Check the ledger and return its numbers of blocks: (free, held, in flight, cached)."""
        assert self.ledger.check() == []
        total, *counts = self.ledger.counts()
        assert sum(counts) == total
        return (*counts,)  # type: ignore[return-value]

    def leases(self) -> Sequence[Lease]:
        return self.ledger.leases()
