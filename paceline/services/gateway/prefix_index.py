"""An index of the blocks that each host has cached, kept up to date by the hosts' block events. Pure.

The router uses it to find the host with the longest prefix of a context. The index is a hint: a block that it lists by
mistake costs a cache miss, and a block that it lacks costs computing a prefix again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.core.context import Context, encoding_context
from paceline.core.kv_layout import KVLayout
from paceline.core.prefix import match_prefix
from paceline.services.common.block_stream import BlockBatch

_MOST_BLOCKS = 1 << 18
"""Most blocks that are noted of one host; further ones are ignored."""


class HostBlocks:
    """The blocks of one host that can be reused, as of the event before `next_event` of its pool.

    Args:
        pool: id of the host's pool; it changes when the pool is created anew.
        next_event: number of the first event that has not been applied.
        names: for each group of `layout.all_groups`, the names of its cached blocks.
    """

    def __init__(self, pool: str, next_event: int, layout: KVLayout, names: Sequence[Sequence[bytes]]) -> None:
        self.pool = pool
        self.next_event = next_event
        self._layout = layout
        self._names = [set(group) for group in names]

    def __len__(self) -> int:
        return sum(map(len, self._names))

    def apply(self, batch: BlockBatch) -> bool:
        """Apply a batch of events. Return False if earlier events are missing or the host has another pool now."""
        known = self.next_event - batch.first
        if batch.pool != self.pool or known < 0:
            return False
        for op, group, digest in batch.events[known:]:
            if group < len(self._names):
                if op == "removed":
                    self._names[group].discard(digest)
                elif len(self) < _MOST_BLOCKS:
                    self._names[group].add(digest)
        self.next_event = max(self.next_event, batch.first + len(batch.events))
        return True

    @property
    def fingerprint(self) -> str:
        return self._layout.fingerprint

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the name and the tokens of each block of the first KV group. Other groups have the same contexts."""
        for name in self._names[0]:
            yield name, self._layout.groups[0].block_tokens

    def cached_tokens(self, context: Context, most: int) -> int:
        """Return how many of a context's first `most` tokens are cached, by the rule that kvtransfer uses."""
        links = context.links(self._layout.fingerprint)
        return match_prefix(self._layout, self._find, links, most)[0]

    def has_encoding(self, digest: bytes, length: int, cache_salt: str) -> bool:
        """Return whether all blocks of an encoding are cached. For the arguments see `encoding_context`."""
        if (layout := self._layout.encodings) is None:
            return False
        context = encoding_context(digest, length, cache_salt, self._layout)
        return match_prefix(layout, self._find, context.links(layout.fingerprint), len(context))[0] == len(context)

    def _find(self, group: int, digest: bytes) -> int | None:
        return 0 if digest in self._names[group] else None


class PrefixIndex:
    """The cached blocks of all hosts, by host id."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostBlocks] = {}

    def host(self, host_id: str) -> HostBlocks | None:
        return self._hosts.get(host_id)

    def hosts(self) -> list[str]:
        return sorted(self._hosts)

    def replace(self, host_id: str, blocks: HostBlocks) -> None:
        """Replace all blocks of a host by the list that the host has sent."""
        self._hosts[host_id] = blocks

    def forget(self, host_id: str) -> None:
        self._hosts.pop(host_id, None)

    def apply(self, batch: BlockBatch) -> bool:
        """Apply events that a host has published. Return False if the host must be asked for its whole list."""
        host = self._hosts.get(batch.host_id)
        return host is not None and host.apply(batch)

    def layouts(self) -> Mapping[str, str]:
        """Return the layout fingerprint of each host's blocks."""
        return {name: host.fingerprint for name, host in self._hosts.items()}

    def cached_tokens(self, context: Context, most: int) -> Mapping[str, int]:
        """Return for each host how many of a context's first `most` tokens it has cached. Omit hosts with none."""
        found = {name: host.cached_tokens(context, most) for name, host in self._hosts.items()}
        return {name: tokens for name, tokens in found.items() if tokens}

    def encoding_hosts(self, digest: bytes, length: int, cache_salt: str) -> list[str]:
        """Return the ids of the hosts that have cached an encoding. For the arguments see `encoding_context`."""
        return sorted(name for name, host in self._hosts.items() if host.has_encoding(digest, length, cache_salt))
