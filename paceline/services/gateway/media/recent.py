"""What was made of items that clients have sent lately, by the names that clients gave them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from paceline.services.gateway.media.expansion import Expansion

_ENTRY_BYTES = 256
"""What an entry takes besides its inputs."""


class RecentMedia:
    """The most recently used expansions of items, within a size.

    Args:
        max_bytes: the size of all inputs together. A larger item is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Expansion] = OrderedDict()
        self._bytes = 0

    def put(self, key: Hashable, expansion: Expansion) -> None:
        """Keep an expansion in place of an older one with the same key. If it is too large, only the older one goes."""
        self._drop(key)
        size = expansion.size + _ENTRY_BYTES
        if size > self._max_bytes:
            return
        self._kept[key] = expansion
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, key: Hashable) -> Expansion | None:
        """Return an expansion; None if it is not kept any more."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _drop(self, key: Hashable) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self._bytes -= old.size + _ENTRY_BYTES
