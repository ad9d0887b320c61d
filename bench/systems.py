"""Systems under test: where each one is, and how to start and stop it so that it has the machine to itself."""

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
"""For a system to end after SIGTERM, before what is left of it is killed."""
KILL_SECONDS = 10.0
POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0


class ServerError(Exception):
    """A server cannot be measured at all."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    url: str
    command: tuple[str, ...] = ()
    """Starts it, in the foreground; empty where it is up already."""


def ending_on_sigterm() -> None:
    """Lets SIGTERM end this program as an exception does, so that what it has started is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def running(system: System, ready_seconds: float = READY_SECONDS) -> Iterator[None]:
    """Has the system up, as /health says; where it has a command, from it on and until none of its processes is left.

    Raises ServerError where it cannot be started, ends, or is not ready in time.
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
    # A proxy from the environment has no business between two processes of one machine.
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
            raise ServerError(f"{system.name} ended with status {process.returncode}; its last words:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"{system.name} is not ready after {seconds:g} seconds; its last words:\n{_tail(log)}")
        time.sleep(POLL_SECONDS)


def _tail(log: IO[bytes]) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - 4000))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-15:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the group, as Ctrl-C in a terminal would reach it; in the end SIGKILL to all that is left."""
    members = _members(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    for member in _wait(process, members, STOP_SECONDS):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    _wait(process, members, KILL_SECONDS)


def _members(session: int) -> list[psutil.Process]:
    """All processes of a session, and their descendants: some have sessions of their own."""
    found: set[psutil.Process] = set()
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(member.pid) == session:
                found |= {member, *member.children(recursive=True)}
    return list(found)


def _wait(process: subprocess.Popen[bytes], members: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of the members that have not ended after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [member for member in members if _is_alive(member)]) and time.monotonic() < deadline:
        process.poll()
        time.sleep(POLL_SECONDS)
    process.poll()
    return left


def _is_alive(process: psutil.Process) -> bool:
    """A zombie has ended; whoever inherited it may never ask for its status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
