"""Two hosts on one machine: network namespaces that a veth pair joins. As root, with `ip` of iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINK = "eth0"
_CLONE_NEWNET = 0x40000000


class NoNamespacesError(RuntimeError):
    """There can be no two hosts on this machine; says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where processes run."""

    ip: str = "127.0.0.1"
    namespace: str = ""
    """Empty is where we are."""

    def command(self) -> list[str]:
        """What stands before the command of a process that is to run there."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens are there, and what it starts."""
        with _entered(Path("/run/netns") / self.namespace) if self.namespace else contextlib.nullcontext():
            yield

    def set_link(self, up: bool) -> None:
        """Cuts the link to the other host at this end, or mends it. Here the other one is unreachable then, and
        there nothing comes any more; each goes on to reach itself."""
        _ip("-n", self.namespace, "link", "set", _LINK, "up" if up else "down")


ONE_HOST = (Host(), Host())
"""Two that are one."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces, until the end. Raises NoNamespacesError."""
    if why := _why_not():
        raise NoNamespacesError(f"two hosts on one machine are network namespaces, and {why}")
    first, second = (Host(f"10.213.77.{number}", f"pl{os.getpid()}-{number}") for number in (1, 2))
    with contextlib.ExitStack() as undo:
        for host in (first, second):
            _ip("netns", "add", host.namespace)
            undo.callback(_ip, "netns", "del", host.namespace)
        pair = ("netns", first.namespace, "type", "veth", "peer", _LINK, "netns", second.namespace)
        _ip("link", "add", _LINK, *pair)
        for host in (first, second):
            _ip("-n", host.namespace, "addr", "add", f"{host.ip}/24", "dev", _LINK)
            for device in ("lo", _LINK):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield first, second


def _why_not() -> str:
    if os.geteuid():
        return "only root can make them"
    if not shutil.which("ip"):
        return "`ip` makes them: install iproute2"
    probe = f"pl{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"there are none here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


@contextlib.contextmanager
def _entered(namespace: Path) -> Iterator[None]:
    with Path("/proc/thread-self/ns/net").open() as before, namespace.open() as there:
        _set_namespace(there.fileno())
        try:
            yield
        finally:
            _set_namespace(before.fileno())


def _set_namespace(descriptor: int) -> None:
    """Of this thread. Python has it from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoNamespacesError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
