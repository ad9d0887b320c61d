"""The folder of --lora-dir: its subfolders get names, and lose them, while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from paceline.core.adapter_folder import Mark, find_adapters, mark_of
from paceline.core.adapters import Adapter, adapter_folders
from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, ConfigError, InvalidRequestError, UnavailableError
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.fleet.adapter_book import AdapterBook
from paceline.services.gateway.fleet.adapter_check import check_adapter
from paceline.services.gateway.fleet.fleet import Fleet

LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


class AdapterWatch:
    """Names the adapters in the subfolders of --lora-dir by the subfolders, from `start` to `close`.

    Without this option it does nothing.

    A subfolder that changes is taken when it has rested for an interval, is complete, and a worker has checked it.

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
        self._before: dict[str, Mark] = {}
        """The subfolders at the last look."""
        self._done: dict[str, Mark] = {}
        """The subfolders that have got their names, or that were refused."""
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
            else:
                self._is_readable = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, folder: Path) -> None:
        """Follow the changes since the last look. Raises OSError if the folder cannot be read."""
        found = await asyncio.to_thread(find_adapters, folder)
        for name, mark in found.items():
            if self._done.get(name) != mark and self._before.get(name) == mark:
                await self._take(folder / name, name, mark)
        for name in [name for name in self._done if name not in found and name not in self._before]:
            del self._done[name]
            if not self._is_taken(name) and self._book.find(name) is not None:
                log.info("the adapter %r is gone from --lora-dir", name)
                self._forget(name)
        self._before = found

    def _is_taken(self, name: str) -> bool:
        return name in self._models or name in self._given

    async def _take(self, folder: Path, name: str, mark: Mark) -> None:
        """Give a subfolder its name, if a worker can say now that it fits the model."""
        if self._is_taken(name):
            log.warning("--lora-dir: %r is the name of a model or of an adapter of --lora-modules already", name)
            self._done[name] = mark
            return
        try:
            adapter = await check_adapter(self._fleet, name, str(mark[0]))
            if await asyncio.to_thread(mark_of, folder) != mark:
                return  # it was written to meanwhile
            if (known := self._book.find(name)) is None or known.digest != adapter.digest:
                self._name(adapter)
                log.info("--lora-dir: the adapter %r is loaded", name)
        except UnavailableError:
            return  # workers may still start
        except (InvalidRequestError, BusyError) as error:
            log.warning("--lora-dir: %s", error)
        self._done[name] = mark
