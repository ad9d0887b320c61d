"""Samples of the compute thread's work, taken from outside by py-spy."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def profiled() -> Iterator[list[str]]:
    """Sample this process with py-spy. The list has its lines after the `with` statement: frames and their count."""
    looks: list[str] = []
    with tempfile.NamedTemporaryFile("r") as file:
        command = ["py-spy", "record", "--pid", str(os.getpid()), "--output", file.name, "--format", "raw"]
        options = ["--rate", "200", "--threads", "--idle", "--nonblocking", "--duration", "3600"]
        spy = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        time.sleep(1.0)  # py-spy reads symbols first
        yield looks
        spy.send_signal(signal.SIGINT)
        output, _ = spy.communicate(timeout=60)
        if not (lines := file.read().splitlines()):
            raise SystemExit(f"py-spy took no samples: {output.decode()}")
        looks += lines


def idle_share(looks: Sequence[str]) -> float:
    """Return the share of samples in which the compute thread was outside a step; NaN without samples."""
    seen = {True: 0, False: 0}
    for line in looks:
        frames, _, count = line.rpartition(" ")
        if "engine-compute" in frames:
            seen["ModelRunner.execute" in frames] += int(count)
    return seen[False] / sum(seen.values()) if looks else math.nan
