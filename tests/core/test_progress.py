"""What the user sees of a download, on a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import pty

import pytest

from paceline.core.progress import Progress, StatusLines, size_text


def test_bars_replace_each_other() -> None:
    lines: list[str] = []
    progress = Progress(1000, lines.append)
    progress.show(0)
    progress.show(2000)
    assert lines[0].startswith(f"\r[{'-' * 24}]   0% of 1 kB, 0 kB/s")
    assert lines[1].startswith(f"\r[{'#' * 24}] 100% of 1 kB, ")


def test_a_log_gets_few_bars() -> None:
    now = 0.0
    stream = io.StringIO()
    report = StatusLines(stream, clock=lambda: now)
    report("begun")
    for second in range(0, 35, 5):
        now = float(second)
        report(f"\r{second} s")
    report("whole")
    assert stream.getvalue() == "begun\n15 s\n30 s\nwhole\n"


def test_a_relayed_stream_gets_bars_for_its_reader_to_replace() -> None:
    stream = io.StringIO()
    report = StatusLines(stream, is_relayed=True)
    report("\rhalf")
    report("whole")
    assert stream.getvalue() == "\rhalf\nwhole\n"


def test_a_terminal_shows_the_last_line_only() -> None:
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        report = StatusLines(stream)
        report("\rhalf")
        report("whole")
        shown = ""
        while not shown.endswith("\n"):  # the kernel may pass the lines on one by one
            shown += os.read(master, 1000).decode()
    os.close(master)
    assert shown == "\r\x1b[Khalf\r\x1b[Kwhole\r\n"


@pytest.mark.parametrize(("size", "text"), [(999, "1 kB"), (93_400_000, "93 MB"), (4_100_000_000, "4.1 GB")])
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text
