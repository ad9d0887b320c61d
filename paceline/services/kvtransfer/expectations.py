"""Hints about blocks, made from a gateway's expectations about contexts."""

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
