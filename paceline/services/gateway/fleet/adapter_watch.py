"""The folder of --lora-dir: its subfolders get names, and lose them, while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from paceline.core.adapter_folder import Mark, find_adapters, mark_of
from paceline.core.adapters import Adapter, adapter_folders
from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError, PacelineError, UnavailableError
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.fleet.adapter_book import AdapterBook
from paceline.services.gateway.fleet.adapter_check import check_adapter
from paceline.services.gateway.fleet.fleet import Fleet

LOOK_SECONDS = 1.0
RETRY_SECONDS = 30.0
"""Time after which a subfolder that a worker has refused is tried again, because a disk or a network may have failed
for a moment only."""

log = logging.getLogger(__name__)


class _Refusal(NamedTuple):
    """What a worker has said of a subfolder."""

    mark: Mark
    message: str
    until: float
    """Instant before which the subfolder is not tried again, on time.monotonic()."""


class AdapterWatch:
    """Names the adapters in the subfolders of --lora-dir by the subfolders, from `start` to `close`.

    Without this option it does nothing.

    A subfolder that changes is taken when it has rested for an interval, is complete, and a worker has checked it. What
    changes last counts: a name that was loaded from elsewhere is left alone, and one that was unloaded comes back only
    if the subfolder's files are newer.

    Args:
        models: names of models, which subfolders cannot have.
        name: gives an adapter its name.
        forget: takes a name away.

    Raises ConfigError if --lora-dir is no folder.
    """

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        book: AdapterBook,
        models: Collection[str],
        name: Callable[[Adapter], object],
        forget: Callable[[str], object],
    ) -> None:
        self._folder = Path(config.lora_dir).expanduser().absolute() if config.lora_dir else None
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"--lora-dir {self._folder} is not a folder; make it, or name another one")
        self._fleet = fleet
        self._book = book
        self._models = models
        self._given = adapter_folders(config).keys()
        self._name = name
        self._forget = forget
        self._before: dict[str, Mark | None] = {}
        """The subfolders at the last look."""
        self._done: dict[str, Mark] = {}
        """The subfolders that have got their names, or cannot have them."""
        self._refused: dict[str, _Refusal] = {}
        """The subfolders that a worker has refused."""
        self._places: dict[str, str] = {}
        """The folder from which each subfolder's name was given last."""
        self._is_readable = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._folder is not None:
            self._task = asyncio.create_task(self._run(self._folder), name="adapter watch")

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)

    async def _run(self, folder: Path) -> None:
        while True:
            try:
                await self._look(folder)
            except OSError as error:
                # The names stay, because a folder that is gone for a moment is no wish to end its adapters.
                if self._is_readable:
                    log.warning("--lora-dir %s cannot be read: %s", folder, error.strerror)
                self._is_readable = False
            except Exception:
                log.exception("--lora-dir %s: this look failed; the next one follows", folder)
            else:
                self._is_readable = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, folder: Path) -> None:
        """Follow the changes since the last look. Raises OSError if the folder cannot be read."""
        found = await asyncio.to_thread(find_adapters, folder, self._before)
        for name, mark in found.items():
            if mark is not None and self._done.get(name) != mark and self._before.get(name) == mark:
                await self._take(folder / name, name, mark)
        for name in [name for name in self._done if name not in found and name not in self._before]:
            del self._done[name]
            if not self._is_taken(name) and (known := self._book.find(name)) is not None and self._is_own(known):
                log.info("the adapter %r is gone from --lora-dir", name)
                self._forget(name)
            self._places.pop(name, None)
        self._refused = {name: refusal for name, refusal in self._refused.items() if name in found}
        self._before = found

    def _is_own(self, adapter: Adapter) -> bool:
        """Return whether an adapter has come from --lora-dir.

        A gateway that has started since then sees this by the adapter's place.
        """
        inside = self._folder is not None and Path(adapter.folder).is_relative_to(self._folder.resolve())
        return inside or adapter.folder == self._places.get(adapter.name)

    def _is_taken(self, name: str) -> bool:
        return name in self._models or name in self._given

    async def _take(self, folder: Path, name: str, mark: Mark) -> None:
        """Give a subfolder its name, if a worker can say now that it fits the model."""
        if self._is_taken(name):
            log.warning("--lora-dir: %r is the name of a model or of an adapter of --lora-modules already", name)
            self._done[name] = mark
            return
        known = self._book.find(name)
        if known is not None and not self._is_own(known):
            log.warning("--lora-dir: %r was loaded from %s; unload it to have the subfolder's", name, known.folder)
            self._done[name] = mark
            return
        if known is None and self._book.removed_at(name) > mark[1]:
            log.info("--lora-dir: %r was unloaded after the subfolder's files were written", name)
            self._done[name] = mark
            return
        refusal = self._refused.get(name)
        if refusal is not None and refusal.mark == mark and time.monotonic() < refusal.until:
            return
        try:
            adapter = await check_adapter(self._fleet, name, mark[0])
            if await asyncio.to_thread(mark_of, folder) != mark:
                return  # it was written to meanwhile
            if (known := self._book.find(name)) is None or known.digest != adapter.digest:
                self._name(adapter)
                log.info("--lora-dir: the adapter %r is loaded", name)
        except UnavailableError:
            return  # workers may still start
        except PacelineError as error:
            if refusal is None or refusal.mark != mark or refusal.message != str(error):
                log.warning("--lora-dir: %s", error)
            self._refused[name] = _Refusal(mark, str(error), time.monotonic() + RETRY_SECONDS)
            return
        self._refused.pop(name, None)
        self._places[name] = mark[0]
        self._done[name] = mark
