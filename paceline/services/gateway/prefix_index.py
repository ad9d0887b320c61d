"""Which host holds the longest prefix of a context: a picture of the hosts' caches, made of their block events.

Pure. It is a hint: what it says too much costs a miss, what it says too little a prefix that is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.context import Context
from paceline.core.kv_layout import KVLayout
from paceline.core.prefix import match_prefix
from paceline.services.common.block_stream import BlockBatch

_MOST_BLOCKS = 1 << 18
"""Of one host; what comes beyond is not noted."""


class HostBlocks:
    """The blocks of one host that can be reused, up to event `next_event` of its pool.

    Args:
        names: of each group.
    """

    def __init__(self, pool: str, next_event: int, layout: KVLayout, names: Sequence[Sequence[bytes]]) -> None:
        self.pool = pool
        self.next_event = next_event
        self._layout = layout
        self._names = [set(group) for group in names]

    def __len__(self) -> int:
        return sum(map(len, self._names))

    def apply(self, batch: BlockBatch) -> bool:
        """Follows the host. False where something in between is missing, or it has another pool now."""
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

    def cached_tokens(self, context: Context, most: int) -> int:
        """Tokens at the front of a context that can be reused, by the rule of the host's own service."""
        links = context.links(self._layout.fingerprint)
        return match_prefix(self._layout, self._find, links, most)[0]

    def _find(self, group: int, digest: bytes) -> int | None:
        return 0 if digest in self._names[group] else None


class PrefixIndex:
    """The caches of all hosts, by name."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostBlocks] = {}

    def host(self, host_id: str) -> HostBlocks | None:
        return self._hosts.get(host_id)

    def hosts(self) -> list[str]:
        return sorted(self._hosts)

    def replace(self, host_id: str, blocks: HostBlocks) -> None:
        """What a host has said itself."""
        self._hosts[host_id] = blocks

    def forget(self, host_id: str) -> None:
        self._hosts.pop(host_id, None)

    def apply(self, batch: BlockBatch) -> bool:
        """What a host has told all. False where it has to be asked for the rest."""
        host = self._hosts.get(batch.host_id)
        return host is not None and host.apply(batch)

    def layouts(self) -> Mapping[str, str]:
        """By host, the fingerprint of its blocks."""
        return {name: host.fingerprint for name, host in self._hosts.items()}

    def cached_tokens(self, context: Context, most: int) -> Mapping[str, int]:
        """By host, how many tokens at the front of a context it has, `most` at most; without hosts that have none."""
        found = {name: host.cached_tokens(context, most) for name, host in self._hosts.items()}
        return {name: tokens for name, tokens in found.items() if tokens}
