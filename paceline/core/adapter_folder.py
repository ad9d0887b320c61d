"""A folder whose subfolders are adapters: which of them are complete, and when their content changes.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeAlias

from paceline.core.adapters import CONFIG_FILE, MOST_CONFIG_BYTES, TENSORS_FILE

Mark: TypeAlias = tuple[object, ...]
"""What changes if the content of an adapter's folder does. It begins with the folder's real path."""

MOST_NAME_CHARACTERS = 256
_MOST_HEADER_BYTES = 16 << 20


def find_adapters(folder: Path) -> dict[str, Mark]:
    """Return the marks of the subfolders that hold an adapter, by their names. Raises OSError.

    Hidden subfolders are left out, so that those in which Kubernetes keeps the versions of a volume are not adapters.
    """
    names = (entry.name for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir())
    found = {name: mark_of(folder / name) for name in sorted(names) if _is_name(name)}
    return {name: mark for name, mark in found.items() if mark is not None}


def mark_of(folder: Path) -> Mark | None:
    """Return the mark of an adapter's folder; None if it is no adapter, or if its files are not complete yet."""
    try:
        # Links may lead elsewhere later, so names get the folder to which they lead now.
        place = os.path.realpath(folder)
        files = [os.stat(os.path.join(place, name)) for name in (CONFIG_FILE, TENSORS_FILE)]
        if not _is_complete(Path(place)):
            return None
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None  # a file that is still written to may hold anything
    return place, *((file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns) for file in files)


def _is_name(name: str) -> bool:
    return name.isprintable() and len(name) <= MOST_NAME_CHARACTERS


def _is_complete(folder: Path) -> bool:
    """Return whether the files of an adapter have their last bytes. Raises errors if they are no adapter."""
    with open(folder / CONFIG_FILE, "rb") as file:
        json.loads(file.read(MOST_CONFIG_BYTES))
    with open(folder / TENSORS_FILE, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
        size = os.fstat(file.fileno()).st_size
    header.pop("__metadata__", None)
    return bool(size == 8 + length + max(entry["data_offsets"][1] for entry in header.values()))
