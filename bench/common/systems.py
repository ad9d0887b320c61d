"""Systems under test: their URLs, and how to start and stop each one so that it has the machine to itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

READY_SECONDS = 300.0
STOP_SECONDS = 60.0
"""Time for a system to end after SIGTERM. Then its remaining processes are killed."""
KILL_SECONDS = 10.0
POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0


class ServerError(Exception):
    """A server cannot be measured."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    url: str
    command: tuple[str, ...] = ()
    """Command that starts the system in the foreground; empty if the system is up already."""


def ending_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that the processes that this program has started are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def running(system: System, ready_seconds: float = READY_SECONDS) -> Iterator[None]:
    """Run a system during a `with` statement, from its first healthy /health until none of its processes is left.

    A system without a command is up already and is left alone.

    Raises ServerError if the system cannot be started, ends early, or is not ready after `ready_seconds`.
    """
    if not system.command:
        yield
        return
    if _is_healthy(system.url):
        raise ServerError(f"something answers at {system.url} already; end it, or do not start {system.name}")
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                system.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise ServerError(f"{system.name} cannot be started: {error}") from error
        try:
            _wait_until_ready(system, process, log, ready_seconds)
            yield
        finally:
            _stop(process)


def _is_healthy(url: str) -> bool:
    # Ignore proxies of the environment: both processes are on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=PROBE_SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def _wait_until_ready(system: System, process: subprocess.Popen[bytes], log: IO[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _is_healthy(system.url):
        if process.poll() is not None:
            raise ServerError(f"{system.name} ended with status {process.returncode}; its last output:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"{system.name} is not ready after {seconds:g} seconds; its last output:\n{_tail(log)}")
        time.sleep(POLL_SECONDS)


def _tail(log: IO[bytes]) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - 4000))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-15:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the process group, as Ctrl-C in a terminal does; later SIGKILL to all processes that remain."""
    members = _members(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    for member in _wait(process, members, STOP_SECONDS):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    _wait(process, members, KILL_SECONDS)


def _members(session: int) -> list[psutil.Process]:
    """Return all processes of a session and their descendants, because some of them have sessions of their own."""
    found: set[psutil.Process] = set()
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(member.pid) == session:
                found |= {member, *member.children(recursive=True)}
    return list(found)


def _wait(process: subprocess.Popen[bytes], members: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait up to `seconds` for all members to end. Return the members that have not ended."""
    deadline = time.monotonic() + seconds
    while (left := [member for member in members if _is_alive(member)]) and time.monotonic() < deadline:
        process.poll()
        time.sleep(POLL_SECONDS)
    process.poll()
    return left


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not: its new parent may never ask for its status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
