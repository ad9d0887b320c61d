"""The adapters of a model by the names that requests use, and their changes, which gateways tell each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from paceline.core.adapters import Adapter, read_adapter
from paceline.core.errors import BusyError
from paceline.proto.fleet_pb2 import AdapterChange

MOST_CHANGES = 2000
"""Largest number of changes that are kept. Each gateway sends its changes with its heartbeats."""
REMOVAL_SECONDS = 600
"""Time after which a removal is forgotten. Until then every gateway that runs has learned of it."""


class AdapterBook:
    """The adapters of one model at one gateway, in the order in which they were named.

    A change of a name is the newest one until a gateway makes a newer one. So all gateways come to the same names, and
    a gateway that starts learns the changes of the others. Redis keeps nothing.

    Args:
        folders: the folder of each adapter, by its name.

    Raises ModelError if the files of an adapter cannot be read.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._adapters = {name: read_adapter(name, folder) for name, folder in folders.items()}
        self._changes: dict[str, AdapterChange] = {}

    def find(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._adapters.values()))

    @property
    def changes(self) -> list[AdapterChange]:
        """The newest change of each name that has changed since the first gateway started."""
        return list(self._changes.values())

    def removed_at(self, name: str) -> int:
        """Return when a name was taken away, in nanoseconds since 1970; 0 if it was not, or long ago."""
        change = self._changes.get(name)
        return 0 if change is None or change.folder else change.changed

    def put(self, adapter: Adapter) -> None:
        """Name an adapter. Requests that have begun go on with the adapter that had the name before.

        Raises BusyError if there are too many names.
        """
        if adapter.name not in self._changes and len(self._changes) >= MOST_CHANGES:
            self._drop_oldest_removal()
        self._take(AdapterChange(name=adapter.name, folder=adapter.folder, digest=adapter.digest))

    def remove(self, name: str) -> None:
        """Forget a name. Requests that have begun go on."""
        self._take(AdapterChange(name=name))

    def _take(self, change: AdapterChange) -> None:
        """Make a change that is newer than all others of its name."""
        known = self._changes.get(change.name)
        change.changed = max(time.time_ns(), 0 if known is None else known.changed + 1)
        self.merge([change])

    def merge(self, changes: Iterable[AdapterChange]) -> None:
        """Take the changes of other gateways that are newer than those that are known."""
        oldest = time.time_ns() - REMOVAL_SECONDS * 10**9
        for name in [name for name, change in self._changes.items() if not change.folder and change.changed < oldest]:
            del self._changes[name]
        for change in changes:
            known = self._changes.get(change.name)
            if known is None and not change.folder and change.changed < oldest:
                continue  # others forget it, too
            if known is not None and (change.changed, change.digest) <= (known.changed, known.digest):
                continue
            self._changes[change.name] = change
            if change.folder:
                self._adapters[change.name] = Adapter(change.name, change.folder, change.digest)
            else:
                self._adapters.pop(change.name, None)

    def _drop_oldest_removal(self) -> None:
        removed = [change for change in self._changes.values() if not change.folder]
        if not removed:
            raise BusyError(f"this server keeps at most {MOST_CHANGES} names of adapters; unload one first")
        del self._changes[min(removed, key=lambda change: change.changed).name]
