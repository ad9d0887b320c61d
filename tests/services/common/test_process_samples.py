"""What a process says about its own memory, descriptors and threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from paceline.core.metrics import Sample
from paceline.services.common.process_samples import ProcessSamples, read_process


def values(samples: tuple[Sample, ...]) -> dict[str, float]:
    return {sample.figure: sample.value for sample in samples}


def test_figures_follow_the_process(tmp_path: Path) -> None:
    before = values(read_process(os.getpid()))
    held, release = b"x" * (64 << 20), threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    with (tmp_path / "file").open("w"):
        after = values(read_process(os.getpid()))
    release.set()
    thread.join()
    assert after["memory_bytes"] - before["memory_bytes"] >= len(held) - (4 << 20)
    assert (after["open_descriptors"] - before["open_descriptors"], after["threads"] - before["threads"]) == (1, 1)


def test_a_process_that_has_ended_has_no_figures() -> None:
    assert read_process(2**22 + 1) == ()


def test_reports_change_seldom() -> None:
    samples = ProcessSamples()
    first = list(samples)
    held = b"x" * (64 << 20)
    assert list(samples) == first
    assert held
