"""Real stacks for tests, started with `paceline serve` as a user starts them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.common.namespaces import Host
from bench.common.services import Process, free_port

SETTLE_SECONDS = 30.0

HAND_OVER = "--local-prefill-tokens=0"
"""Sends all prompts to prefill workers, although the tests' prompts are short enough for decode workers."""


def arenas(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the arena files that these processes map. Other stacks on this machine have arenas of their own."""
    paths = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has just ended
            paths |= {Path(each.path) for each in process.memory_maps()}
    return {path for path in paths if path.suffix == ".arena"}


def is_settled(ledgers: Sequence[Any]) -> bool:
    """Check that the ledgers balance, and return whether no block is leased or in flight on these hosts.

    A host that does not answer, for example because its KV service has just started, is not settled.
    """
    if any("error" in ledger for ledger in ledgers):
        return False
    assert all(ledger["balanced"] and ledger["adds_up"] for ledger in ledgers)
    return not any(ledger["held"] or ledger["in_flight"] or ledger["leases"] for ledger in ledgers)


class Stack:
    """A running `paceline serve` and its URL."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.hosts: Sequence[Host] = (Host(),)
        self.admin: dict[str, str] = {}  # a process of this machine needs no key

    def fleet(self) -> dict[str, Any]:
        # A new client reads all authorities of the system, which takes longer than the answer, unless told not to.
        return dict(httpx.get(f"{self.url}/fleet", timeout=10, verify=False).json())

    async def settled(self) -> None:
        """Wait until no block is leased or in flight, which may take until the current steps have ended.

        The deadline is long because steps are slow on some machines. It fails a test only if blocks are never released.
        """
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                if is_settled(self.fleet()["hosts"]):
                    return
                await asyncio.sleep(0.1)

    def living(self, role: str) -> list[int]:
        """Return the pids of this role's processes that were ready and have not ended."""
        # With several models, the name of a worker has its model in front.
        newest = dict(re.findall(rf"^  ((?:\S+/)?{role}\S*) +pid (\d+)", self.process.text, re.MULTILINE))
        return sorted(int(pid) for pid in newest.values() if psutil.pid_exists(int(pid)))

    def family(self) -> list[psutil.Process]:
        """Return the supervisor and all of its processes."""
        root = psutil.Process(self.process.popen.pid)
        return [root, *root.children(recursive=True)]


@contextlib.contextmanager
def serve(
    log: Path, model: str, *options: str, environment: dict[str, str] | None = None, fleets: int = 1
) -> Iterator[Stack]:
    """Start a whole stack and stop it at the end. Then check that no process and no shared memory is left.

    Args:
        model: MODEL, or the option --models-file with a file of `fleets` models.
    """
    port = free_port()
    # Gateways of other stacks would run batches that they find in a common store.
    own = (f"--port={port}", f"--store={log}.db", HAND_OVER)
    process = Process(log, "serve", model, *own, *options, environment=environment)
    stack = Stack(process, port)
    family: list[psutil.Process] = []
    shared: set[Path] = set()
    try:
        process.wait_for("Ready.")
        family = stack.family()
        shared = arenas(family)
        assert len(shared) == fleets
        yield stack
    finally:
        code = process.stop(signal.SIGINT)
    assert code == 0, process.text
    assert not [child for child in family if child.is_running()]
    # Pools of workers have files beside the arena's, with the same stem.
    assert not [path for arena in shared for path in arena.parent.glob(f"{arena.stem}*")]
