"""What the user sees of a download, on a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import pty

import pytest

from paceline.core.progress import Progress, StatusLines, size_text


def test_tenths_are_lines_and_the_end_is_not() -> None:
    lines: list[str] = []
    progress = Progress(5_000_000_000, lines.append, live=False)
    for done in (0, 400_000_000, 600_000_000, 900_000_000, 2_600_000_000, 5_000_000_000):
        progress.show(done)
    assert lines == ["downloaded 600 MB of 5.0 GB", "downloaded 2.6 GB of 5.0 GB"]


def test_a_bar_is_replaced_in_place() -> None:
    lines: list[str] = []
    progress = Progress(1000, lines.append, live=True)
    progress.show(0)
    progress.show(2000)
    assert lines[0].startswith(f"\r[{'-' * 24}]   0% of 1 kB, 0 kB/s")
    assert lines[1].startswith(f"\r[{'#' * 24}] 100% of 1 kB, ")


def test_a_pipe_gets_lines_for_its_reader_to_replace() -> None:
    stream = io.StringIO()
    report = StatusLines(stream)
    report("\rhalf")
    report("whole")
    assert stream.getvalue() == "\rhalf\nwhole\n"


def test_a_terminal_shows_the_last_line_only() -> None:
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        report = StatusLines(stream)
        report("\rhalf")
        report("whole")
        shown = os.read(master, 1000).decode()
    os.close(master)
    assert shown == "\r\x1b[Khalf\r\x1b[Kwhole\r\n"


@pytest.mark.parametrize(("size", "text"), [(999, "1 kB"), (93_400_000, "93 MB"), (4_100_000_000, "4.1 GB")])
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text
