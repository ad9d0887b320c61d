"""The adapters that a worker has in memory, as a gateway knows them."""

from __future__ import annotations

from collections.abc import Iterable


class KnownAdapters:
    """The adapters in a worker's last report, and those of this gateway's newer calls, which the worker reads first.

    Adapters are numbers, as `core.adapters.short_digest` makes them.

    Args:
        reported: the adapters in the worker's report.
    """

    def __init__(self, reported: Iterable[int]) -> None:
        self.now = frozenset(reported)
        self._sent: tuple[set[int], set[int]] = set(), set()
        """Adapters of calls between the last two reports, and after the last one."""

    def send(self, adapter: int) -> None:
        """Note that a call with this adapter begins; 0 for the model alone."""
        if adapter and adapter not in self.now:
            self._sent[1].add(adapter)
            self.now |= {adapter}

    def update(self, reported: Iterable[int]) -> None:
        """Take over a newer report, which may have been written before calls after the last one."""
        self._sent = (self._sent[1], set())
        self.now = frozenset(reported).union(self._sent[0])
