"""`paceline cache`: lists the files that Paceline has made in its cache folder, and removes them."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from paceline.core.config import ServeConfig
from paceline.core.errors import ConfigError
from paceline.core.progress import size_text
from paceline.models.files.cache import CacheEntry, cache_entries, keep_within, prune, removal_text, size_limit

_DAY_SECONDS = 86_400.0
_HEADINGS = ("MODEL", "WHAT", "SIZE", "LAST USE", "IN USE")


def show_cache(config: ServeConfig) -> None:
    """Print a line for each entry of the cache folder, the least recently used first, and the size of all entries.

    Raises ModelError if the folder cannot be read.
    """
    folder = Path(config.cache_dir).expanduser().absolute()
    entries = cache_entries(folder)
    rows = [_HEADINGS, *map(_row, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if entries else ():
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    used = sum(entry.size for entry in entries)
    limit = f" of {size_text(size_limit(config.cache_size, folder, used))}" if entries else ""
    print(f"{folder}: {size_text(used)}{limit}")


def prune_cache(config: ServeConfig, everything: bool, older_than: float | None) -> None:
    """Remove entries that are not in use from the cache folder, and print what was removed.

    Without `everything` and `older_than`, remove the least recently used entries until the others fit --cache-size.

    Args:
        everything: whether to remove all entries.
        older_than: remove entries that were last used more than this many days ago; None if the user set no age.

    Raises:
        ConfigError: the options exclude each other.
        ModelError: the folder cannot be read, or something in it cannot be removed.
    """
    folder = Path(config.cache_dir).expanduser().absolute()
    if everything and older_than is not None:
        raise ConfigError("--all and --older-than exclude each other; leave one of them out")
    if older_than is not None and not older_than >= 0:
        raise ConfigError(f"--older-than must be at least 0 days, not {older_than:g}")
    if everything or older_than is not None:
        before = time.time() - (older_than or 0.0) * _DAY_SECONDS
        removed = prune(folder, lambda entry, _: everything or entry.last_use < before)
    else:
        removed = keep_within(folder, config.cache_size)
    in_use = sum(entry.in_use for entry in cache_entries(folder))
    print(f"removed {removal_text(removed)} from {folder}" + (f"; {in_use} in use stay" if in_use else ""))


def _row(entry: CacheEntry) -> tuple[str, ...]:
    used = datetime.fromtimestamp(entry.last_use).isoformat(" ", "minutes")
    return entry.model, entry.kind, size_text(entry.size), used, "yes" if entry.in_use else "no"
