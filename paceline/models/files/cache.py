"""The files that Paceline makes in its cache folder: conversions and packed weights. Imports no torch.

Downloads, digests, tunings and the store of responses are in the same folder, but this file does not manage them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from paceline.core.errors import ModelError
from paceline.core.options import parse_bytes
from paceline.core.progress import size_text
from paceline.models.files.folder_lease import REMOVED, clear, is_leased, remove_unless_leased

PACKED = ".shards"
"""Suffix of folders of packed weights."""
OLD_PACKED = ".packed"
"""Suffix of files of packed weights, which older versions wrote."""
UNFINISHED = ".tmp"
"""Suffix of folders of packed weights that are being written."""
SCRATCH = ".tmp-"
"""Part of the name of folders in which models are being converted."""

_KEY = re.compile(r"(?P<name>.+?)-[0-9a-f]{16}(?=$|[-.])")
"""The form of names of kept results, which `cache_key` makes."""
_RECENT_SECONDS = 600.0
"""Seconds after its last use for which a result is kept without a lease, because a stack that starts has not leased all
files yet.
"""

Kind = Literal["conversion", "packed weights", "unfinished"]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A result that is kept in the cache folder, or an incomplete result of a killed process."""

    kind: Kind
    model: str
    """The model's name. For packed weights, it includes the part of the model and the quantization."""
    path: Path
    size: int
    """Size of all files of the entry, in bytes."""
    last_use: float
    """Time of the last use, in seconds since the Unix epoch."""
    in_use: bool
    """Whether a process uses or makes the entry; also True if this cannot be known."""
    leased: Path
    """The folder that processes lease while they use the entry."""


def mark_used(folder: Path) -> None:
    """Set the time of a folder's last use to now. Raises OSError if the folder does not exist any more."""
    try:
        os.utime(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Nobody may write here. The folder can still be used, and nobody removes it.


def cache_entries(cache_dir: Path) -> list[CacheEntry]:
    """Return everything that Paceline has made in its cache folder, the least recently used first.

    Raises ModelError if the folder cannot be read.
    """
    found: list[CacheEntry] = []
    try:
        for folder in (cache_dir, cache_dir / "packed"):
            for path in folder.iterdir() if folder.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):  # another process removes it
                    found += _entry(path, folder is not cache_dir)
    except OSError as error:
        raise ModelError(f"cannot read the cache folder {cache_dir}: {error.strerror or error}") from error
    return sorted(found, key=lambda entry: entry.last_use)


def size_limit(text: str, cache_dir: Path, used: int) -> int:
    """Return the number of bytes that conversions and packed weights may take together.

    Args:
        text: an amount such as "20GiB", or "auto" for half of the sum of the disk's free space and `used`.
        used: number of bytes that conversions and packed weights take now.

    Raises:
        ModelError: the free space cannot be read.
    """
    if text != "auto":
        return parse_bytes(text)
    try:
        return (shutil.disk_usage(cache_dir).free + used) // 2
    except OSError as error:
        raise ModelError(f"cannot read the free space of {cache_dir}: {error.strerror or error}") from error


def prune(cache_dir: Path, is_due: Callable[[CacheEntry, int], bool]) -> list[CacheEntry]:
    """Remove incomplete results of killed processes, and all entries that are due and not in use. Return the removed
    entries.

    Args:
        is_due: called with each entry, least recently used first, and the bytes that all remaining entries take.

    Raises:
        ModelError: the folder cannot be read, or an entry cannot be removed.
    """
    entries, removed = cache_entries(cache_dir), list[CacheEntry]()
    left = sum(entry.size for entry in entries)
    for entry in entries:
        if entry.in_use:
            with contextlib.suppress(OSError):  # it may be gone, or belong to another user
                mark_used(entry.leased)
        elif (entry.kind == "unfinished" or is_due(entry, left)) and _remove(entry):
            removed.append(entry)
            left -= entry.size
    if removed:
        _remove_dead_links(cache_dir)
    return removed


def keep_within(cache_dir: Path, limit: str) -> list[CacheEntry]:
    """Remove the least recently used entries until all entries take at most `limit`, a text for `size_limit`.

    Entries that are in use, or were used in the last ten minutes, stay.
    """
    used = sum(entry.size for entry in cache_entries(cache_dir))
    size = size_limit(limit, cache_dir, used) if used else 0
    recent = time.time() - _RECENT_SECONDS
    return prune(cache_dir, lambda entry, left: left > size and entry.last_use < recent)


def removal_text(removed: Sequence[CacheEntry]) -> str:
    """Return a text with the number and the size of removed entries, for a log line."""
    results = "1 result" if len(removed) == 1 else f"{len(removed)} results"
    return f"{results} of {size_text(sum(entry.size for entry in removed))}"


def _entry(path: Path, is_packed: bool) -> Iterator[CacheEntry]:
    """Yield the entry at this path; none if Paceline has made nothing there that can be removed."""
    if path.is_symlink():
        return
    name, used = path.name, path.stat().st_mtime
    key = _KEY.match(name.removeprefix("."))
    if name.startswith(".") and REMOVED in name:
        yield CacheEntry("unfinished", _model(name), path, _size(path), used, False, path)
    elif key is None:
        return
    elif (is_packed and path.suffix == UNFINISHED) or (not is_packed and name.startswith(f".{key[0]}{SCRATCH}")):
        lock = path.with_name(f".{key[0]}.lock")
        yield CacheEntry("unfinished", key["name"], path, _size(path), used, _is_locked(lock), lock)
    elif is_packed and path.suffix in (PACKED, OLD_PACKED):
        in_use = path.is_dir() and is_leased(path)
        yield CacheEntry("packed weights", key["name"], path, _size(path), used, in_use, path)
    elif not is_packed and key[0] == name and (path / key["name"] / "config.json").is_file():
        model = path / key["name"]
        yield CacheEntry("conversion", key["name"], path, _size(path), model.stat().st_mtime, is_leased(model), model)


def _model(name: str) -> str:
    key = _KEY.match(name.removeprefix("."))
    return name if key is None else key["name"]


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder, without what links lead to."""
    if path.is_file():
        return path.stat().st_size
    size = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _is_locked(lock: Path) -> bool:
    """Return whether a process is making something under this lock, or that cannot be known."""
    if not lock.exists():
        return True
    try:
        with FileLock(lock).acquire(blocking=False):
            return False
    except (Timeout, OSError):
        return True


def _remove(entry: CacheEntry) -> bool:
    """Remove an entry, and return False if it has come into use meanwhile."""
    try:
        if entry.kind != "unfinished":
            return remove_unless_leased(entry.path, entry.leased)
        if REMOVED in entry.path.name:
            clear(entry.path)
            return True
        with FileLock(entry.leased).acquire(blocking=False):
            clear(entry.path)
        return True
    except Timeout:
        return False
    except OSError as error:
        raise ModelError(f"cannot remove {entry.path}: {error.strerror or error}; remove it by hand") from error


def _remove_dead_links(cache_dir: Path) -> None:
    """Remove links to conversions that are gone, such as the one with the name of a bundled model."""
    for link in cache_dir.iterdir():
        if link.is_symlink() and not link.exists() and link.readlink().is_relative_to(cache_dir.resolve()):
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
