"""Real stacks for tests: `paceline serve` as a user starts it, or its services one by one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 300.0
STOP_SECONDS = 60.0
SETTLE_SECONDS = 30.0
PACELINE = (sys.executable, "-m", "paceline")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def arenas(processes: Iterable[psutil.Process]) -> set[Path]:
    """The shared memory that these processes map; other stacks of this machine are none of our business."""
    paths = {Path(each.path) for process in processes for each in process.memory_maps()}
    return {path for path in paths if path.suffix == ".arena"}


class Process:
    """A command of ours, its output in a file."""

    def __init__(self, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                [*PACELINE, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> str:
        """The output, as soon as it contains `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert self.alive, f"ended before saying {text!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"did not say {text!r}:\n{self.text}"
            time.sleep(0.05)
        return self.text

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code; a process that does not end is killed and fails the test."""
        if self.alive:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise


class Stack:
    """What runs behind one URL."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def fleet(self) -> dict[str, object]:
        return dict(httpx.get(f"{self.url}/fleet", timeout=10).json())

    async def settled(self) -> None:
        """Returns when nothing is held or in flight any more: with the steps under way at the latest.

        How long a step takes is the machine's affair; that blocks do not come back at all is ours.
        """
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                hosts: Any = self.fleet()["hosts"]
                assert all(ledger["balanced"] and ledger["adds_up"] for ledger in hosts)
                if all(ledger["held"] == ledger["in_flight"] == 0 and not ledger["holds"] for ledger in hosts):
                    return
                await asyncio.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        """The supervisor and all of its processes."""
        root = psutil.Process(self.process.popen.pid)
        return [root, *root.children(recursive=True)]


@contextlib.contextmanager
def serve(log: Path, model: str, *options: str, environment: dict[str, str] | None = None) -> Iterator[Stack]:
    """A whole stack; when it has been stopped nothing of it may be left."""
    port = free_port()
    process = Process(log, "serve", model, f"--port={port}", *options, environment=environment)
    stack = Stack(process, port)
    family: list[psutil.Process] = []
    shared: set[Path] = set()
    try:
        process.wait_for("Ready.")
        family = stack.family()
        shared = arenas(family)
        assert len(shared) == 1
        yield stack
    finally:
        code = process.stop(signal.SIGINT)
    assert code == 0, process.text
    assert not [child for child in family if child.is_running()]
    assert not [path for path in shared if path.exists()]
