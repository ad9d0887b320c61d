"""Folders for what a command keeps beside its output file, where others may write, too."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.core.errors import ConfigError


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can read, or check that it is one, because an earlier run has made it.

    Raises ConfigError if something else has this name, and OSError if the folder cannot be made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{folder}, which keeps what is done so far, is no folder that only you can read; remove it, or give "
                "another output file"
            ) from None
