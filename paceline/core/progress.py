"""Lines for the user about slow operations. The line of a running download is replaced in place on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TextIO

_BAR_CELLS = 24
_CLEAR_LINE = "\r\x1b[K"
_QUIET_SECONDS = 15.0


class StatusLines:
    """Prints lines to a stream. A line that begins with "\\r" is provisional: a terminal replaces it by the next line.

    Other streams, such as log files, get a provisional line only every 15 seconds.

    Args:
        is_relayed: whether another process passes the lines on to a terminal. It gets all lines as they are.
    """

    def __init__(self, stream: TextIO, is_relayed: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._is_relayed = is_relayed
        self._clock = clock
        self._quiet_until = clock() + _QUIET_SECONDS

    def __call__(self, line: str) -> None:
        """Print a line. Nothing is printed if the stream's other end was closed."""
        provisional = line.startswith("\r")
        if self._stream.isatty():
            text = _CLEAR_LINE + line.removeprefix("\r") + ("" if provisional else "\n")
        elif self._is_relayed:
            text = line + "\n"
        elif provisional and self._clock() < self._quiet_until:
            return
        else:
            text = line.removeprefix("\r") + "\n"
            self._quiet_until = self._clock() + _QUIET_SECONDS
        with contextlib.suppress(OSError):
            print(text, end="", file=self._stream, flush=True)


class Progress:
    """The progress of a download or of other work, as bars that replace each other.

    Args:
        total: size of the whole work: bytes, or a number of items.
        report: gets the bars. Each is a line that begins with "\\r" (see StatusLines).
        items: name of the items, such as "texts"; "" for bytes.
        done: size of the work that was done before.
    """

    def __init__(self, total: int, report: Callable[[str], None], items: str = "", done: int = 0) -> None:
        self._total = max(total, 1)
        self._report = report
        self._items = items
        self._done = done
        self._start = time.monotonic()

    def show(self, done: int) -> None:
        """Report that the bytes or items up to `done` have arrived."""
        share = min(done / self._total, 1.0)
        rate = (done - self._done) / max(time.monotonic() - self._start, 0.001)
        bar = "#" * int(share * _BAR_CELLS)
        self._report(f"\r[{bar:-<{_BAR_CELLS}}] {share:4.0%} of {self._size(self._total)}, {self._size(rate)}/s")

    def _size(self, size: float) -> str:
        return f"{size:,.0f} {self._items}" if self._items else size_text(size)


def size_text(size: float) -> str:
    """Return a number of bytes as text, in units of 1000: 300 kB, 93 MB or 4.1 GB."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
