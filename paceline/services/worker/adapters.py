"""The adapters that a worker has in memory. They are read on a thread of their own, before their requests begin."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.core.adapters import DIGEST_BYTES
from paceline.core.errors import BusyError, InvalidRequestError, ModelError, UnavailableError
from paceline.core.machine import yield_to_others
from paceline.core.metrics import Family, Sample
from paceline.models.adapters.loading import LoadedAdapter
from paceline.models.adapters.model_adapters import ModelAdapters
from paceline.proto import common_pb2 as pb

ADAPTERS = Family("lora_adapters", "Adapters in a worker's memory", "gauge")
LOADS = Family("lora_loads", "Adapters that a worker has read into memory")


@dataclass(slots=True, eq=False)
class _Held:
    """An adapter in memory, or on its way there."""

    loaded: asyncio.Future[LoadedAdapter]
    requests: int = 0
    """Number of requests that need it."""


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
        self._loads = 0

    @property
    def slots(self) -> int:
        """Largest number of adapters in one batch."""
        return 0 if self._adapters is None else self._adapters.slots

    def check(self, folders: Iterable[str]) -> None:
        """Read adapters once, to find errors. Raises ModelError."""
        for folder in folders:
            assert self._adapters is not None
            self._adapters.read(Path(folder).expanduser())

    @contextlib.asynccontextmanager
    async def holding(self, work: pb.Work) -> AsyncIterator[None]:
        """Keep the adapter of a request in memory for the body of a `with` statement.

        Raises:
            BusyError: running requests need as many other adapters as the worker may have in memory.
            InvalidRequestError: the adapter cannot be served, or has no digest.
            UnavailableError: the worker takes no adapters.
        """
        if not work.HasField("adapter"):
            yield
            return
        held = self._find(work.adapter)
        held.requests += 1
        try:
            # Other requests may wait for the same adapter.
            await asyncio.shield(held.loaded)
            yield
        finally:
            held.requests -= 1

    def forget_unused(self) -> None:
        """Drop the adapters that no request needs. The next request of each reads it again."""
        self._held = {digest: held for digest, held in self._held.items() if held.requests}

    def adapter_of(self, work: pb.Work) -> LoadedAdapter | None:
        """Return the adapter of a request, which `holding` keeps; None if the request has none."""
        return self._held[work.adapter.digest].loaded.result() if work.HasField("adapter") else None

    def _find(self, wanted: pb.Adapter) -> _Held:
        """Return the adapter that a request wants. If it is not in memory, begin to read it."""
        if self._adapters is None:
            raise UnavailableError("this worker takes no adapters, because it was started without --enable-lora")
        digest = wanted.digest
        if len(digest) != DIGEST_BYTES:  # names of blocks would not tell its content
            raise InvalidRequestError(f"the digest of an adapter has {DIGEST_BYTES} bytes", "model")
        held = self._held.pop(digest, None)
        if held is None:
            self._make_room()
            loading = asyncio.ensure_future(self._read(self._adapters, wanted))
            held = _Held(loading)
            loading.add_done_callback(lambda _: self._drop_failed(digest, held))
        self._held[digest] = held
        return held

    def _make_room(self) -> None:
        if len(self._held) < self._most:
            return
        unused = next((digest for digest, held in self._held.items() if not held.requests), None)
        if unused is None:
            raise BusyError(
                f"running requests need all {self._most} adapters that this worker may have in memory (--max-cpu-loras)"
            )
        del self._held[unused]

    async def _read(self, adapters: ModelAdapters, wanted: pb.Adapter) -> LoadedAdapter:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, adapters.read, Path(wanted.folder), wanted.digest)
        except ModelError as error:
            raise InvalidRequestError(f"{wanted.name}: {error}", "model") from error
        self._loads += 1
        return found

    def _drop_failed(self, digest: bytes, held: _Held) -> None:
        failed = held.loaded.cancelled() or held.loaded.exception() is not None
        if failed and self._held.get(digest) is held:
            del self._held[digest]

    def samples(self) -> Iterator[Sample]:
        """Yield the figures for metrics."""
        if self._adapters is not None:
            yield Sample("lora_adapters", len(self._held), ADAPTERS)
            yield Sample("lora_loads", self._loads, LOADS)
