"""A look from outside at what the compute thread does, by py-spy."""

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
    """Lets py-spy look at this process; the list then holds its lines: frames of a thread, and how often they came."""
    looks: list[str] = []
    with tempfile.NamedTemporaryFile("r") as file:
        command = ["py-spy", "record", "--pid", str(os.getpid()), "--output", file.name, "--format", "raw"]
        options = ["--rate", "200", "--threads", "--idle", "--nonblocking", "--duration", "3600"]
        spy = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        time.sleep(1.0)  # it reads symbols first
        yield looks
        spy.send_signal(signal.SIGINT)
        output, _ = spy.communicate(timeout=60)
        if not (lines := file.read().splitlines()):
            raise SystemExit(f"py-spy has seen nothing: {output.decode()}")
        looks += lines


def idle_share(looks: Sequence[str]) -> float:
    """How often the compute thread was seen outside of steps."""
    seen = {True: 0, False: 0}
    for line in looks:
        frames, _, count = line.rpartition(" ")
        if "engine-compute" in frames:
            seen["ModelRunner.execute" in frames] += int(count)
    return seen[False] / sum(seen.values()) if looks else math.nan
