"""An index of the hosts that have each block, so that one search finds the longest prefix of each host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.context import Tail
from paceline.core.kv_layout import KVLayout
from paceline.core.prefix import HostSet, match_prefixes


class BlockHolders:
    """The hosts that have cached each block of one layout. Hosts have numbers from 0; low numbers take less memory."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._holders: tuple[dict[bytes, HostSet], ...] = tuple({} for _ in layout.all_groups)
        """For each group, a map from a block's name to the hosts that have it. Blocks that no host has are left out."""

    def apply(self, host: int, events: Iterable[tuple[str, int, bytes]]) -> None:
        """Note blocks that became or ceased to be reusable on a host.

        Args:
            host: number of the host, from 0.
            events: `BlockEvent`s, or tuples with the same three values.
        """
        bit = 1 << host
        for op, group, name in events:
            holders = self._holders[group]
            if op == "stored":
                known = holders.get(name)
                # Most blocks have one holder. They share one integer.
                holders[name] = bit if known is None else known | bit
            elif left := holders.get(name, 0) & ~bit:
                holders[name] = left
            else:
                holders.pop(name, None)

    def cached_tokens(self, links: Sequence[bytes], most: int, tails: Sequence[Tail] = ()) -> dict[int, int]:
        """Return the length of the longest cached prefix by host number, in tokens. Hosts that have none are left out.

        Args:
            links: the links of the context.
            most: largest number of tokens of the context to reuse.
            tails: tails of the context that may be cached.
        """
        return match_prefixes(self.layout, self._holders, links, most, tails)

    def cached_rows(self, links: Sequence[bytes], rows: int) -> dict[int, int]:
        """Return how many of an encoding's first `rows` rows each host has cached. Hosts that have none are left out.

        Raises InvalidRequestError if the layout has no encodings.
        """
        return match_prefixes(self.layout.part(encoding=True), self._holders, links, rows)
