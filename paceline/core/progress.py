"""Lines for the user about slow operations. The line of a running download is replaced in place on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TextIO

_BAR_CELLS = 24
_CLEAR_LINE = "\r\x1b[K"


class StatusLines:
    """A stream of lines. On a terminal, a line that begins with "\\r" is replaced by the line after it.

    Elsewhere every line is printed as it is, so that a parent process can replace lines in its own terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, line: str) -> None:
        """Print a line. Nothing is printed if the stream's other end was closed."""
        if self._stream.isatty():
            text = _CLEAR_LINE + line.removeprefix("\r") + ("" if line.startswith("\r") else "\n")
        else:
            text = line + "\n"
        with contextlib.suppress(OSError):
            print(text, end="", file=self._stream, flush=True)


class Progress:
    """The progress of a download: a bar that is replaced in place, or a line for each further tenth.

    Args:
        total_bytes: size of the whole download.
        report: gets the lines.
        live: whether the lines are bars, which begin with "\\r" (see StatusLines).
    """

    def __init__(self, total_bytes: int, report: Callable[[str], None], live: bool) -> None:
        self._total = max(total_bytes, 1)
        self._report = report
        self._live = live
        self._start = time.monotonic()
        self._tenths = 0

    def show(self, done_bytes: int) -> None:
        """Report that `done_bytes` have arrived."""
        share = min(done_bytes / self._total, 1.0)
        if self._live:
            rate = done_bytes / max(time.monotonic() - self._start, 0.001)
            bar = "#" * int(share * _BAR_CELLS)
            self._report(f"\r[{bar:-<{_BAR_CELLS}}] {share:4.0%} of {size_text(self._total)}, {size_text(rate)}/s")
        elif self._tenths < int(share * 10) < 10:
            self._tenths = int(share * 10)
            self._report(f"downloaded {size_text(done_bytes)} of {size_text(self._total)}")


def size_text(size: float) -> str:
    """Return a number of bytes as text, in units of 1000: 300 kB, 93 MB or 4.1 GB."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
