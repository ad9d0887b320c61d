"""The adapters that a worker has in memory. They are read on a thread of their own, before their requests begin."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.core.adapters import DIGEST_BYTES, UnreadableAdapterError, short_digest
from paceline.core.errors import BusyError, InvalidRequestError, ModelError, UnavailableError
from paceline.core.machine import yield_to_others
from paceline.core.metrics import Family, Sample
from paceline.models.adapters.loading import LoadedAdapter
from paceline.models.adapters.model_adapters import ModelAdapters
from paceline.models.sources.hub_adapter import HubAdapter, adapter_folder, parse_hub_adapter
from paceline.proto import common_pb2 as pb
from paceline.proto.fleet_pb2 import AdapterReport
from paceline.services.worker.adapter_times import AdapterTimes

ADAPTERS = Family("lora_adapters", "Adapters in a worker's memory", "gauge")
EVICTIONS = Family("lora_evictions", "Adapters that made room for others in a worker's memory")

ANSWER_SECONDS = 5.0
"""Longest time for which a request waits here for its adapter, in seconds. A worker that is silent for twice as long
counts as failed. The reading goes on, and a later attempt finds the adapter."""
MOST_REPORTED = 512
"""Largest number of adapters in a report. Those that were used longest ago are left out."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    """An adapter in memory, or on its way there."""

    loaded: asyncio.Future[LoadedAdapter]
    requests: int = 0
    """Number of requests that need it."""

    @property
    def is_unused(self) -> bool:
        """Whether it may make room. An adapter that is being read stays, because its request may come again."""
        return not self.requests and self.loaded.done()


class AdapterStore:
    """The adapters in a worker's memory. Those that were used longest ago, and that no request needs, make room.

    Args:
        adapters: the model's adapters; None if the worker was started without --enable-lora.
        most: largest number of adapters in memory.
    """

    def __init__(self, adapters: ModelAdapters | None, most: int) -> None:
        self._adapters = adapters
        self._most = most
        self._held: dict[bytes, _Held] = {}  # the adapter that was used longest ago comes first
        # Running requests have the cores first.
        self._thread = ThreadPoolExecutor(1, "adapters", yield_to_others)
        self._times = AdapterTimes()
        self._evictions = 0

    @property
    def slots(self) -> int:
        """Largest number of adapters in one batch."""
        return 0 if self._adapters is None else self._adapters.slots

    def check(self, folders: Iterable[str]) -> None:
        """Read adapters once, to find errors. Raises ModelError."""
        for folder in folders:
            assert self._adapters is not None
            self._adapters.read(adapter_folder(folder, log.info))

    async def examine(self, name: str, folder: str) -> pb.Adapter:
        """Read an adapter that is about to get a name, and return it with its digest. It does not stay in memory.

        Args:
            folder: its folder, or its name on the hub. The result has the hub's commit in place of a branch.

        Raises:
            InvalidRequestError: the adapter cannot be served.
            UnavailableError: the worker takes no adapters.
        """
        adapters = self._needed()
        if (hub := parse_hub_adapter(folder)) is not None:
            place = await self._found(name, folder)
            folder = str(HubAdapter(hub.repository, place.name))
        try:
            found = await self._read(adapters, pb.Adapter(name=name, folder=folder))
        except UnreadableAdapterError as error:
            raise InvalidRequestError(f"{name}: {error}", "model") from error
        return pb.Adapter(name=name, folder=folder, digest=found.digest)

    @contextlib.asynccontextmanager
    async def holding(self, work: pb.Work, seconds: float | None = None) -> AsyncIterator[None]:
        """Keep the adapter of a request in memory for the body of a `with` statement.

        Args:
            seconds: time left until the request's deadline, in seconds; None if it has none.

        Raises:
            BusyError: running requests need as many other adapters as the worker may have in memory, or the adapter
                cannot be read in time.
            InvalidRequestError: the adapter cannot be served, or has no digest.
            UnavailableError: the worker takes no adapters, or this machine lacks the adapter's files.
        """
        if not work.HasField("adapter"):
            yield
            return
        held = self._find(work.adapter, seconds)
        held.requests += 1
        try:
            try:
                await _arrived(held, seconds)
            except UnreadableAdapterError as error:  # other workers may have read it before it got its name
                raise UnavailableError(f"{work.adapter.name}: {error}") from error
            yield
        finally:
            held.requests -= 1

    def forget_unused(self) -> None:
        """Drop the adapters that no request needs. The next request of each reads it again."""
        self._held = {digest: held for digest, held in self._held.items() if held.requests}

    def adapter_of(self, work: pb.Work) -> LoadedAdapter | None:
        """Return the adapter of a request, which `holding` keeps; None if the request has none."""
        return self._held[work.adapter.digest].loaded.result() if work.HasField("adapter") else None

    def _find(self, wanted: pb.Adapter, seconds: float | None) -> _Held:
        """Return the adapter that a request wants. If it is not in memory, begin to read it."""
        adapters, digest = self._needed(), wanted.digest
        if len(digest) != DIGEST_BYTES:  # names of blocks would not tell its content
            raise InvalidRequestError(f"the digest of an adapter has {DIGEST_BYTES} bytes", "model")
        held = self._held.pop(digest, None)
        if held is None:
            needed = self._miss_seconds
            # If nothing else is read, reading delays nobody, and corrects an expectation that was too long.
            if seconds is not None and self._is_reading and needed > seconds:
                time_left = f"the request ends in {seconds:.1f} s"
                raise BusyError(f"this worker takes about {needed:.1f} s to read the adapter, and {time_left}")
            self._make_room()
            loading = asyncio.ensure_future(self._read(adapters, wanted))
            held = _Held(loading)
            loading.add_done_callback(lambda _: self._drop_failed(digest, held))
        self._held[digest] = held
        return held

    def _needed(self) -> ModelAdapters:
        """Return the model's adapters. Raises UnavailableError if the worker takes none."""
        if self._adapters is None:
            raise UnavailableError("this worker takes no adapters, because it was started without --enable-lora")
        return self._adapters

    def _make_room(self) -> None:
        if len(self._held) < self._most:
            return
        unused = next((digest for digest, held in self._held.items() if held.is_unused), None)
        if unused is None:
            raise BusyError(
                f"running requests need all {self._most} adapters that this worker may have in memory (--max-cpu-loras)"
            )
        del self._held[unused]
        self._evictions += 1

    async def _read(self, adapters: ModelAdapters, wanted: pb.Adapter) -> LoadedAdapter:
        loop = asyncio.get_running_loop()
        folder = await self._found(wanted.name, wanted.folder)
        try:
            found, seconds = await loop.run_in_executor(self._thread, _timed_read, adapters, folder, wanted.digest)
        except UnreadableAdapterError:
            raise
        except ModelError as error:
            raise InvalidRequestError(f"{wanted.name}: {error}", "model") from error
        self._times.note(seconds)
        return found

    async def _found(self, name: str, place: str) -> Path:
        """Return the folder of an adapter, which may have to be downloaded. Raises InvalidRequestError."""
        if os.path.isabs(place):
            return Path(place)
        try:
            # Adapters of other requests are read meanwhile.
            return await asyncio.to_thread(adapter_folder, place, log.info)
        except ModelError as error:
            raise InvalidRequestError(f"{name}: {error}", "model") from error

    def _drop_failed(self, digest: bytes, held: _Held) -> None:
        failed = held.loaded.cancelled() or held.loaded.exception() is not None
        if failed and self._held.get(digest) is held:
            del self._held[digest]

    @property
    def _is_reading(self) -> bool:
        return any(not held.loaded.done() for held in self._held.values())

    @property
    def _miss_seconds(self) -> float:
        """Expected time until a further adapter is in memory, in seconds: one is read after the other."""
        return self._times.expected * (1 + sum(not held.loaded.done() for held in self._held.values()))

    def report(self) -> AdapterReport:
        """Return the adapters in memory, by which gateways place requests. The report changes seldom."""
        if self._adapters is None:
            return AdapterReport()
        newest = list(self._held)[-MOST_REPORTED:]
        return AdapterReport(
            digests=sorted(map(short_digest, newest)), miss_seconds=self._miss_seconds, slots=self._adapters.slots
        )

    def samples(self) -> Iterator[Sample]:
        """Yield the figures for metrics."""
        if self._adapters is not None:
            yield Sample("lora_adapters", len(self._held), ADAPTERS)
            yield Sample("lora_evictions", self._evictions, EVICTIONS)
            yield from self._times.samples()


def _timed_read(adapters: ModelAdapters, folder: Path, digest: bytes) -> tuple[LoadedAdapter, float]:
    """Read an adapter. Return it with the time that this took, in seconds. Raises ModelError."""
    began = time.monotonic()
    return adapters.read(folder, digest), time.monotonic() - began


async def _arrived(held: _Held, seconds: float | None) -> None:
    """Wait until an adapter is in memory. Raises BusyError if this takes too long, and the errors of the reading."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS if seconds is None else min(seconds, ANSWER_SECONDS)):
            await asyncio.shield(held.loaded)  # other requests may wait for the same adapter
    except TimeoutError:
        raise BusyError("this worker still reads the adapter; other adapters came first, or it is large") from None
