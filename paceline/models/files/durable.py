"""Files and folders that appear whole or not at all, even if the power fails. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def rename_durably(source: Path, target: Path) -> None:
    """Give a file or folder another name. Its whole content is on the disk before it has the new name.

    `target` must be in the same file system, and no folder with files. Raises OSError.
    """
    for parent, _, names in os.walk(source):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                _sync(path)
        _sync(Path(parent))
    if source.is_file():
        _sync(source)
    source.replace(target)
    _sync(target.parent)


def write_durably(target: Path, text: str) -> None:
    """Write a text file, or replace it. Readers see the old text or the new one. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    scratch = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        scratch.chmod(0o644)
        rename_durably(scratch, target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
