"""Figures of a service's own process for metrics, such as its memory, so that operators can see leaks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.metrics import Family, Sample

MEMORY = Family(
    "process_memory_bytes", "Private memory of a process, rounded to MiB; not the shared KV memory", "gauge"
)
DESCRIPTORS = Family("process_open_descriptors", "Files, sockets and pipes that a process has open", "gauge")
THREADS = Family("process_threads", "Threads of a process", "gauge")

_SECONDS = 10.0
"""Least time between two readings, in seconds, because a member's report should change rarely."""


class ProcessSamples:
    """The figures of this process, read from /proc. There are no figures on systems without /proc."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._samples: tuple[Sample, ...] = ()

    def __iter__(self) -> Iterator[Sample]:
        if time.monotonic() >= self._read_at + _SECONDS:
            self._read_at, self._samples = time.monotonic(), read_process(os.getpid())
        return iter(self._samples)


def read_process(pid: int) -> tuple[Sample, ...]:
    """Return memory, descriptors and threads of a process; empty if it has ended, or if there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return ()
    found = {name: int(value) for name, value in re.findall(r"^(RssAnon|Threads):\s+(\d+)", status, re.MULTILINE)}
    return (
        Sample("memory_bytes", found.get("RssAnon", 0) // 1024 << 20, MEMORY),
        Sample("open_descriptors", descriptors, DESCRIPTORS),
        Sample("threads", found.get("Threads", 0), THREADS),
    )
