"""The output of `paceline serve` for its user."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def say(text: str) -> None:
    _print(text, sys.stdout)


def warn(text: str) -> None:
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    # If the terminal was closed, go on, because the stack must still be stopped.
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)
