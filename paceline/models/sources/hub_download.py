"""The download of large files from the hub, with progress, that can be interrupted. Imports no torch."""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.progress import Progress, size_text

_CONNECTIONS = 8
_SHOW_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository that is not in the cache yet."""

    name: str
    size: int
    """Size of the file, in bytes."""


def missing_files(repository: str, commit: str, names: Sequence[str]) -> list[HubFile]:
    """Return the files that the cache lacks. Raises exceptions of huggingface_hub."""
    from huggingface_hub import hf_hub_download

    found = [hf_hub_download(repository, name, revision=commit, dry_run=True) for name in names]
    return [HubFile(name, info.file_size or 0) for name, info in zip(names, found) if info.will_download]


def check_space(files: Sequence[HubFile]) -> None:
    """Raise ModelError if the files do not fit on the disk of the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    needed, free = sum(file.size for file in files), shutil.disk_usage(place).free
    if needed > free:
        raise ModelError(
            f"the download needs {size_text(needed)} and {cache} has {size_text(free)} free; free some space there, or "
            "choose a folder on another disk with HF_HUB_CACHE"
        )


def download(repository: str, commit: str, files: Sequence[HubFile], report: Callable[[str], None]) -> None:
    """Download files to the cache that all tools of this machine share.

    After a broken connection, a download continues at the last byte. After an interrupted process, complete files stay.

    Raises exceptions of huggingface_hub.
    """
    total = sum(file.size for file in files)
    report(f"downloading {size_text(total)} of {repository}")
    work = _Work(repository, commit, files)
    progress = Progress(total, report)
    try:
        # Threads of a pool would keep an interrupted process alive until their files are whole.
        for _ in files[:_CONNECTIONS]:
            threading.Thread(target=work.run, daemon=True).start()
        while not work.is_done.wait(_SHOW_SECONDS):
            progress.show(work.done_bytes)
    finally:
        work.stop.set()
        _remove_partial_files()
    if work.errors:
        raise work.errors[0]
    report(f"downloaded {size_text(total)} of {repository}")


def _remove_partial_files() -> None:
    """Remove the files that this process is still writing to the cache, because no later download could use them."""
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if descriptor.readlink().suffix == ".incomplete":
                descriptor.readlink().unlink()


class _StoppedError(Exception):
    """Ends the download of a file that nobody waits for any more."""


class _Work:
    """Files that several threads download."""

    def __init__(self, repository: str, commit: str, files: Sequence[HubFile]) -> None:
        self._repository = repository
        self._commit = commit
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()
        for file in files:
            self._names.put(file.name)
        self._lock = threading.Lock()
        self.done_bytes = 0
        self.errors: list[Exception] = []
        self._left = len(files)
        self.stop = threading.Event()
        self.is_done = threading.Event()
        """Set when all files are whole, or one has failed."""

    def run(self) -> None:
        """Download files until no file is left, a file has failed, or `stop` is set."""
        from huggingface_hub import hf_hub_download

        while not self.stop.is_set():
            try:
                name = self._names.get_nowait()
            except queue.Empty:
                return
            try:
                hf_hub_download(self._repository, name, revision=self._commit, tqdm_class=_counter(self))
            except Exception as error:
                self.errors.append(error)
                self.is_done.set()
                return
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self.is_done.set()

    def count(self, added: int) -> None:
        """Add bytes that have arrived. Raises _StoppedError if the download shall end."""
        if self.stop.is_set():
            raise _StoppedError
        with self._lock:
            self.done_bytes += added


def _counter(work: _Work) -> type[Any]:
    """Return a class that huggingface_hub takes for a progress bar, and that counts bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            work.count(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Count nothing: these are bytes on the network, and `update` counts the bytes of the file."""

    return Counter
