"""Hints about blocks, made from a gateway's expectations about contexts; and hints that have come before their blocks.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.core.cache_policy.hints import MOST_HINTS, MOST_SOURCE_BYTES, Hint
from paceline.core.cache_policy.ranking import Name
from paceline.core.context import HASH_BYTES, full_block_names
from paceline.core.errors import InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.proto import kvtransfer_pb2 as pb


def hinted_blocks(layout: KVLayout, links: Sequence[bytes], hints: Sequence[Hint]) -> Iterator[tuple[Name, Hint]]:
    """Yield the blocks that a request needs to reuse the expected prefixes, each with the hint that expects it soonest.

    Blocks before the window of a prefix are left out, because a request that reuses the prefix does not read them.

    Args:
        layout: the layout of KV.
        links: the links of the context.
        hints: expectations about prefixes of the context.
    """
    nearest: dict[Name, Hint] = {}
    for hint in sorted(hints, key=lambda hint: -hint.seconds):
        length = min(hint.tokens, len(links) * BASE_TOKENS) // layout.alignment * layout.alignment
        for number, group in enumerate(layout.groups, layout.first_group):
            for digest in full_block_names(group, links, length)[group.first_needed_block(length) :]:
                nearest[number, digest] = hint
    # From the end, so that a block is hinted before the blocks that it needs. Blocks are released in this order, too.
    yield from reversed(nearest.items())


def expectation_from_pb(message: pb.Expectation) -> tuple[list[bytes], list[Hint]]:
    """Return the links of the context and the hints. Raises InvalidRequestError if the message is not valid."""
    hashes = message.hashes
    if len(hashes) % HASH_BYTES or len(message.hints) > MOST_HINTS:
        raise InvalidRequestError(f"an expectation has whole hashes and at most {MOST_HINTS} hints")
    if any(len(hint.source) > MOST_SOURCE_BYTES for hint in message.hints):
        raise InvalidRequestError(f"the source of a hint has at most {MOST_SOURCE_BYTES} bytes")
    links = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    return links, [Hint(hint.tokens, hint.within_ms / 1000, hint.source) for hint in message.hints]


EARLY_SECONDS = 5.0
"""Longest time that a hint waits for its block. A block that comes later belongs to another request, which has its own
hints.
"""
MOST_EARLY = 1 << 16
"""Largest number of hints that wait. The oldest are dropped first, because a hint is no promise."""


class EarlyHints:
    """Hints about blocks that are not readable yet.

    A decode worker publishes the last blocks of a request after it has sent the last token, so on a busy host the
    gateway's hints may be faster. All methods take `now`, in seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._waiting: dict[Name, tuple[Hint, float]] = {}  # each with the time at which it came, oldest first

    def put(self, name: Name, hint: Hint, now: float) -> None:
        """Keep a hint until its block comes. It replaces an earlier hint about the same block."""
        self._waiting.pop(name, None)
        self._waiting[name] = hint, now
        if len(self._waiting) > MOST_EARLY:
            del self._waiting[next(iter(self._waiting))]

    def take(self, name: Name, now: float) -> Hint | None:
        """Remove and return the hint about a block that has become readable; None if there is none."""
        self._drop_old(now)
        hint, _ = self._waiting.pop(name, (None, now))
        return hint

    def _drop_old(self, now: float) -> None:
        while self._waiting and now - self._waiting[oldest := next(iter(self._waiting))][1] > EARLY_SECONDS:
            del self._waiting[oldest]
