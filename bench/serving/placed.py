"""Run `paceline serve` with chosen cores and priorities for its workers, to compare this with turns.

A worker with a core of its own takes no turns; run it with `--threads 1`. For example, as a system of
`bench.serving.compare`:

    --start apart='python -m bench.serving.placed --cores prefill=0 --cores decode=1 -- --port 8071 --threads 1'
    --start nice='python -m bench.serving.placed --nice prefill=10 -- --port 8072'
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

POLL_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.placed", description=__doc__.partition("\n")[0])
    parser.add_argument("--cores", action="append", default=[], type=cores, help="such as prefill=0 or decode=0,1")
    parser.add_argument(
        "--nice", action="append", default=[], type=niceness, help="niceness to add to a role, such as prefill=3"
    )
    parser.add_argument("flags", nargs="*", help="options of `paceline serve`, after --")
    options = parser.parse_args()
    serve = subprocess.Popen([sys.executable, "-m", "paceline", "serve", *options.flags])
    signal.signal(signal.SIGTERM, lambda *_: serve.terminate())
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C in a terminal reaches `serve` too.
    _place(serve, dict(options.cores), dict(options.nice))
    sys.exit(serve.wait())


def cores(text: str) -> tuple[str, list[int]]:
    """Parse a role and its cores, such as "decode=0,1". Raises ValueError."""
    role, value = _role_and_value(text)
    return role, [int(core) for core in value.split(",")]


def niceness(text: str) -> tuple[str, int]:
    """Parse a role and a niceness, such as "prefill=3". Raises ValueError."""
    role, value = _role_and_value(text)
    return role, int(value)


def _role_and_value(text: str) -> tuple[str, str]:
    role, _, value = text.partition("=")
    if role not in ("prefill", "decode"):
        raise ValueError(f"no such role: {role}")
    return role, value


def _place(serve: subprocess.Popen[bytes], cores: dict[str, list[int]], nice: dict[str, int]) -> None:
    """Wait for the first worker of each role and place all its threads. Threads that they start later inherit this."""
    waiting = set(cores) | set(nice)
    while waiting and serve.poll() is None:
        time.sleep(POLL_SECONDS)
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(serve.pid).children():
                role = next((role for role in waiting if role in child.cmdline()), None)
                if role is not None:
                    place_threads(child, cores.get(role), nice.get(role, 0))
                    waiting.discard(role)


def place_threads(process: psutil.Process, cores: list[int] | None, nice: int) -> None:
    for thread in process.threads():
        if cores is not None:
            os.sched_setaffinity(thread.id, cores)
        if nice:
            os.setpriority(os.PRIO_PROCESS, thread.id, os.getpriority(os.PRIO_PROCESS, thread.id) + nice)


if __name__ == "__main__":
    main()
