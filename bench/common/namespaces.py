"""Two hosts on one machine: network namespaces joined by a veth pair. Needs root and `ip` of iproute2."""

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
    """Network namespaces cannot be made on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host on which processes run: this one, or a network namespace."""

    ip: str = "127.0.0.1"
    namespace: str = ""
    """Name of the network namespace; empty for the current one."""

    def command(self) -> list[str]:
        """Return the prefix of a command that makes it run on this host."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread to the host: sockets that it opens and processes that it starts are there."""
        with _entered(Path("/run/netns") / self.namespace) if self.namespace else contextlib.nullcontext():
            yield

    def set_link(self, up: bool) -> None:
        """Cut the link to the other host at this end, or restore it.

        While it is cut, this host cannot reach the other one, and the other one receives nothing. Each still reaches
        itself.
        """
        _ip("-n", self.namespace, "link", "set", _LINK, "up" if up else "down")


ONE_HOST = (Host(), Host())
"""A pair of hosts that are both this machine."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two network namespaces for the `with` statement. Raises NoNamespacesError."""
    if why := _why_not():
        raise NoNamespacesError(f"two hosts on one machine need network namespaces: {why}")
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
        return "`ip` is missing: install iproute2"
    probe = f"pl{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"none can be made here: {made.stderr.strip()}"
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
    """Set the network namespace of this thread. From Python 3.12 on, os.setns does this."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoNamespacesError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
