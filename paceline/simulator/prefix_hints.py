"""Which host has which blocks, for many hosts: what the gateway's prefix index knows, with one lookup for all hosts.

`services/gateway/prefix_index.py` asks each host's set of names in turn. Here, each name has a set of hosts, which are
the bits of a number. The answers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.block_pool import BlockEvent


class PrefixHints:
    """The blocks that hosts have published."""

    def __init__(self) -> None:
        self._hosts: dict[bytes, int] = {}

    def apply(self, host: int, events: Iterable[BlockEvent]) -> None:
        """Note blocks that became or ceased to be reusable on a host.

        Args:
            host: number of the host, from 0.
        """
        bit = 1 << host
        hosts = self._hosts
        for op, _, name in events:
            if op == "stored":
                hosts[name] = hosts.get(name, 0) | bit
            elif left := hosts.get(name, 0) & ~bit:
                hosts[name] = left
            else:
                hosts.pop(name, None)

    def cached_blocks(self, names: Sequence[bytes]) -> dict[int, int]:
        """Return for each host how many of a context's first blocks it has. Hosts without the first are left out."""
        found: dict[int, int] = {}
        here = self._hosts.get(names[0], 0) if names else 0
        for count, name in enumerate(names):
            still = here & self._hosts.get(name, 0)
            _note(found, here & ~still, count)
            if not (here := still):
                return found
        _note(found, here, len(names))
        return found


def _note(found: dict[int, int], hosts: int, count: int) -> None:
    """Set the count of some hosts, which are the bits of a number."""
    while count and hosts:
        lowest = hosts & -hosts
        found[lowest.bit_length() - 1] = count
        hosts ^= lowest
