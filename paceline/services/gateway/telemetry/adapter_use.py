"""The adapters of a model in use: by which requests of this gateway, and in which workers' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.core.adapters import short_digest
from paceline.services.gateway.fleet.adapter_book import AdapterBook
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.sequences.load import TrafficBook
from paceline.services.gateway.telemetry.used_names import UsedNames

SHOWN = 50
"""Largest number of adapters that people are shown. Those that requests use come first."""


class AdapterUse:
    """The use of one model's adapters, as this gateway knows it.

    Args:
        book: the adapters by name.
        traffic: the sequences that wait or run.
        workers: function that returns the members of the fleet.
    """

    def __init__(self, book: AdapterBook, traffic: TrafficBook, workers: Callable[[], Iterable[RemoteWorker]]) -> None:
        self._book, self._traffic, self._workers = book, traffic, workers

    def names(self) -> UsedNames:
        """Return the names that sequences use now."""
        running, waiting = self._traffic.adapters()
        slots = max((each.member.lora.slots for each in self._workers()), default=0)
        return UsedNames(sorted(running), sorted(waiting), slots)

    def describe(self) -> list[dict[str, Any]]:
        """Return the JSON of at most SHOWN adapters: their names, numbers of sequences, and workers that have them."""
        running, waiting = self._traffic.adapters()
        adapters = sorted(self._book, key=lambda each: (-running[each.name] - waiting[each.name], each.name))[:SHOWN]
        places: dict[int, list[str]] = {short_digest(each.digest): [] for each in adapters}
        for worker in self._workers() if adapters else ():
            for digest in places.keys() & set(worker.member.lora.digests):
                places[digest].append(worker.member.worker_id)
        return [
            {
                "name": each.name,
                "digest": each.digest.hex(),
                "running": running[each.name],
                "waiting": waiting[each.name],
                "workers": sorted(places[short_digest(each.digest)]),
            }
            for each in adapters
        ]
