"""A host of the simulated fleet: the real ledger with its cache policy, and a network that takes time."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.core.block_counts import Counts
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.errors import BusyError
from paceline.core.kv_layout import BASE_TOKENS, GroupShape, KVGroup, KVLayout
from paceline.core.prefix import BlockHolders
from paceline.core.step_times import Profile
from paceline.core.types import Key
from paceline.engine.chunk_planner import GROWTH_TOKENS
from paceline.services.gateway.fleet.members import MEASURED_BYTES
from paceline.services.kvtransfer.ledger.lease import TRANSFER
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.simulator.sequence import HeldLease, Sequence

LAYOUT = KVLayout((KVGroup(GroupShape("kv", (0,), 1, 1), BASE_TOKENS),), 2, 64, "simulated")
"""The KV layout of simulated hosts. The ledger counts units instead of tokens: BASE_TOKENS units fill a block, whatever
number of tokens a block of the simulation has.
"""


class Host:
    """One host.

    Args:
        number: number among all hosts, from 0.
        block_tokens: tokens of a block.
        policy: makes the cache policy for a number of blocks.
    """

    def __init__(
        self,
        number: int,
        profile: Profile,
        block_tokens: int,
        policy: Callable[[int], CachePolicy],
        hints: BlockHolders,
    ) -> None:
        self.number, self.name = number, f"h{number:04}"
        self.tokens = profile.host_tokens
        """Number of tokens whose KV the host can hold."""
        self._block_tokens = block_tokens
        self._unit = block_tokens // BASE_TOKENS
        self._profile = profile
        self._hints = hints
        self._free_at = 0.0
        """Instant at which the network into the host will have moved all requested blocks."""
        self._fetched_bytes = self._fetch_seconds = 0.0
        blocks = max(1, self.tokens // block_tokens)
        self.ledger = Ledger(LAYOUT, blocks, math.inf, policy(blocks))

    # ---- leases

    def reserve(self, sequence: Sequence, session: int, now: float) -> int:
        """Reserve blocks for a sequence's context and the beginning of its answer. Return the number of cached tokens.

        Raises BusyError if too few blocks are available, and InvalidRequestError if the host never has enough.
        """
        whole = sequence.context // self._block_tokens
        names = sequence.block_names(whole)
        capacity = sequence.context + GROWTH_TOKENS
        key = Key(f"{sequence.number}", sequence.attempt, 0)
        # The last token is always computed, because the first one of the answer follows from it.
        most = (sequence.context - 1) // self._unit
        lease = self.ledger.reserve(session, key, names, -(-capacity // self._unit), most, now)
        cached = lease.filled_tokens * self._unit
        blocks = len(lease.tables[0])
        sequence.held[self.name] = HeldLease(key, session, blocks * self._block_tokens, cached // self._block_tokens)
        return cached

    def open(self, sequence: Sequence, session: int, now: float) -> None:
        """Make a prefill worker of this host the writer of the blocks that decode has reserved."""
        held = sequence.held[self.name]
        held.key = self.ledger.open(session, held.key, now).key
        held.session = session

    def seal(self, sequence: Sequence, tokens: int, now: float) -> None:
        """Publish the full blocks among the first `tokens` tokens of a context."""
        held = sequence.held[self.name]
        end = tokens // self._block_tokens
        if end > held.sealed:
            names = sequence.block_names(end)[held.sealed :]
            self.ledger.seal(held.session, held.key, 0, held.sealed, names, now)
            held.sealed = end

    def hand_over(self, sequence: Sequence, session: int, now: float) -> None:
        """Make a decode worker the writer of the blocks that prefill, or a transfer, has filled."""
        held = sequence.held[self.name]
        self.ledger.fill(held.session, held.key, -(-sequence.context // self._unit), now)
        held.key = self.ledger.adopt(session, held.key, now).key
        held.session = session

    def extend(self, sequence: Sequence, length: int, now: float) -> int:
        """Add blocks so that more tokens fit after the first `length` ones. Return the number of tokens that then fit.

        Raises BusyError if there are no blocks.
        """
        held = sequence.held[self.name]
        wanted = min(length, sequence.prompt_tokens + sequence.answer_tokens) + GROWTH_TOKENS
        lease = self.ledger.extend(held.session, held.key, -(-wanted // self._unit), now)
        held.capacity = len(lease.tables[0]) * self._block_tokens
        return held.capacity

    def release(self, sequence: Sequence, now: float) -> None:
        """Give back the blocks of a sequence. Sealed blocks stay cached."""
        if (held := sequence.held.pop(self.name, None)) is not None:
            self.ledger.release(held.session, held.key, now)

    # ---- the network

    def receive(self, tokens: float, now: float) -> float:
        """Return the instant at which the blocks of `tokens` tokens have come from other hosts."""
        moved = tokens * self._profile.token_bytes
        seconds = moved / self._profile.transfer_bytes
        self._fetched_bytes += moved
        self._fetch_seconds += seconds
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at + self._profile.transfer_seconds

    @property
    def fetch_tokens_per_second(self) -> float:
        """Measured rate at which blocks come from other hosts; 0 before enough have come."""
        if self._fetched_bytes < MEASURED_BYTES or self._fetch_seconds <= 0:
            return 0.0
        return self._fetched_bytes / self._profile.token_bytes / self._fetch_seconds

    def store(self, sequence: Sequence, blocks: int, now: float) -> None:
        """Put the first blocks of a context, which have come from another host, into the cache. Do nothing if there is
        no room.
        """
        key = Key(f"prefix of {sequence.number}", sequence.attempt, 0)
        tokens = blocks * BASE_TOKENS
        names = sequence.block_names(blocks)
        try:
            lease = self.ledger.reserve(TRANSFER, key, names, tokens, tokens, now)
        except BusyError:
            return
        here = lease.filled_tokens // BASE_TOKENS
        self.ledger.seal(TRANSFER, key, 0, here, names[here:], now)
        self.ledger.release(TRANSFER, key, now)

    # ---- the cache

    def publish(self) -> None:
        """Tell the gateway about blocks that became or ceased to be reusable."""
        self._hints.apply(self.number, self.ledger.take_events())

    def counts(self) -> Counts:
        return self.ledger.counts()
