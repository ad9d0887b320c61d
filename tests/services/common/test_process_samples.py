"""What a process says about its own memory, descriptors and threads."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

from paceline.core.metrics import Sample
from paceline.services.common.process_samples import ProcessSamples, read_process


def values(samples: tuple[Sample, ...]) -> dict[str, float]:
    return {sample.figure: sample.value for sample in samples}


def test_figures_follow_the_process(tmp_path: Path) -> None:
    before = values(read_process(os.getpid()))
    # A mapping of its own: the allocator may serve a large object from memory that the process holds already.
    held, release = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), threading.Event()
    held.write(b"x" * len(held))
    thread = threading.Thread(target=release.wait)
    thread.start()
    with (tmp_path / "file").open("w"):
        after = values(read_process(os.getpid()))
    release.set()
    thread.join()
    size = len(held)
    held.close()
    assert after["memory_bytes"] - before["memory_bytes"] >= size - (4 << 20)
    assert (after["open_descriptors"] - before["open_descriptors"], after["threads"] - before["threads"]) == (1, 1)


def test_a_process_that_has_ended_has_no_figures() -> None:
    assert read_process(2**22 + 1) == ()


def test_reports_change_seldom() -> None:
    samples = ProcessSamples()
    first = list(samples)
    held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"x" * len(held))
    assert list(samples) == first
    held.close()
