"""A folder whose subfolders are adapters: which of them are complete, and when their content changes.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from paceline.core.adapters import CONFIG_FILE, MOST_CONFIG_BYTES, TENSORS_FILE, is_adapter_name, open_adapter_file
from paceline.core.errors import ModelError

Mark: TypeAlias = tuple[str, int, tuple[object, ...]]
"""What changes if the content of an adapter's folder does: the real path of the folder, the time at which its
files were last written or copied there, in nanoseconds since 1970, and further figures of its files."""

_MOST_HEADER_BYTES = 16 << 20


def find_adapters(folder: Path, known: Mapping[str, Mark | None] | None = None) -> dict[str, Mark | None]:
    """Return the marks of the subfolders that hold files of an adapter, by their names. Raises OSError.

    The mark is None as long as the files are not complete. Hidden subfolders are left out, so that those in which
    Kubernetes keeps the versions of a volume are not adapters.

    Args:
        known: the result for the same folder before. Only files that have changed since are read.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    own = [name for name in names if is_adapter_name(name) and _has_files(folder / name)]
    return {name: mark_of(folder / name, (known or {}).get(name)) for name in own}


def mark_of(folder: Path, known: Mark | None = None) -> Mark | None:
    """Return the mark of an adapter's folder; None if it is no adapter, or if its files are not complete yet.

    Args:
        known: a mark that the folder had when it was complete.
    """
    try:
        # Links may lead elsewhere later, so names get the folder to which they lead now.
        place = os.path.realpath(folder)
        place.encode()  # workers get it as UTF-8
        files = [os.stat(os.path.join(place, name)) for name in (CONFIG_FILE, TENSORS_FILE)]
        figures = tuple((file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
        # Copies may keep the times of their originals, except for this one.
        mark = place, max(file.st_ctime_ns for file in files), figures
        return mark if mark == known or _is_complete(Path(place)) else None
    except (OSError, ValueError, RecursionError, ModelError):
        return None


def _has_files(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in (CONFIG_FILE, TENSORS_FILE))


def _is_complete(folder: Path) -> bool:
    """Return whether the files of an adapter have their last bytes.

    Raises OSError, ValueError, RecursionError or ModelError if a file is damaged, or is no file.
    """
    with open_adapter_file(folder, CONFIG_FILE, MOST_CONFIG_BYTES) as file:
        json.loads(file.read(MOST_CONFIG_BYTES))
    with open_adapter_file(folder, TENSORS_FILE) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
        size = os.fstat(file.fileno()).st_size
    try:
        header.pop("__metadata__", None)
        return bool(size == 8 + length + max(entry["data_offsets"][1] for entry in header.values()))
    except (AttributeError, IndexError, KeyError, TypeError):
        raise ValueError("this is no header of a safetensors file") from None
