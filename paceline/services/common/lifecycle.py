"""The life of a service process: signals, its own address, the announcement that it is ready, garbage collections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paceline.core.config import ServiceConfig
from paceline.core.errors import ConfigError
from paceline.services.common.redis_url import without_password

UNDO_SECONDS = 5.0
"""Longest time for a cancelled start to undo its changes, in seconds."""

_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737, RFC 3849), by which the default route is found. No packet is sent to them."""
_ANY_PORT = 9

Started = TypeVar("Started")

log = logging.getLogger(__name__)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT will set. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


async def start_unless_stopped(start: Coroutine[Any, Any, Started], stop: asyncio.Event) -> Started:
    """Run `start` and return its result. If `stop` is set first, cancel `start` and end the process with code 0."""
    starting, stopping = asyncio.ensure_future(start), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
    finally:
        for task in (starting, stopping):
            task.cancel()
    await asyncio.wait((starting,), timeout=UNDO_SECONDS)
    log.info("stopped before it had started")
    logging.shutdown()
    # A thread that reads a model cannot be cancelled, and the interpreter would wait for it.
    os._exit(0)


def reachable_address(config: ServiceConfig, port: int) -> str:
    """Return the host:port at which other hosts reach this service. Raises ConfigError if the address cannot be
    determined.
    """
    host = (config.advertise or config.host).strip("[]")
    if host in ("0.0.0.0", "::"):
        address = best_address(_own_addresses(config.redis, socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC))
        if address is None:
            raise ConfigError(
                f"cannot find the address at which others reach {socket.gethostname()}; add --advertise HOST"
            )
        host = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def best_address(candidates: Sequence[str]) -> str | None:
    """Return the first address that other machines can reach, else the first address; None if there is no address."""
    for address in candidates:
        kind = ipaddress.ip_address(address)
        # A link-local address needs a scope, which other machines do not know.
        if not kind.is_loopback and not kind.is_link_local:
            return address
    return candidates[0] if candidates else None


def announce_ready(config: ServiceConfig, address: str) -> None:
    """Tell the parent process that this service takes requests, if the parent passed --ready-fd.

    Args:
        address: the address of the service, which is sent to the parent.
    """
    # Objects that exist by now will stay, so the garbage collector need not check them again. Checking all of torch's
    # objects takes about 50 ms, during which this process runs no other Python code.
    gc.collect()
    gc.freeze()
    if config.ready_fd >= 0:
        os.write(config.ready_fd, f"{address}\n".encode())
        os.close(config.ready_fd)


def unique_name(role: str) -> str:
    return f"{role}-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"


def _own_addresses(redis: str, family: socket.AddressFamily) -> list[str]:
    """Return the local addresses from which this machine reaches Redis and other networks, the best one first.

    Services that use the same Redis can most likely reach us at the address from which we reach Redis. The host's own
    name is not resolved, because /etc/hosts may give it a loopback address. Raises ConfigError if `redis` is no URL.
    """
    try:
        url = urlsplit(redis)
        redis_place = url.hostname or "localhost", url.port or _ANY_PORT  # a Unix socket has neither
    except ValueError:
        raise ConfigError(f"--redis {without_password(redis)} is not a URL") from None
    addresses = []
    for host, port in (redis_place, *((host, _ANY_PORT) for host in _ANYWHERE)):
        with contextlib.suppress(OSError):  # no such name, or no route
            for kind, *_, target in socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM):
                with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                    probe.connect(target)  # with UDP this finds the route and sends nothing
                    addresses.append(str(probe.getsockname()[0]))
    return addresses


LOOK_SECONDS = 1.0
WORTHWHILE = 10
"""Number of collections of the middle generation after which a full collection is worthwhile; Python's default, too."""
BUSY_SECONDS = 120.0
"""Least time between two full collections while requests run, in seconds."""
_NEVER = 1 << 30


async def collect_when_idle(running: Callable[[], int]) -> None:
    """Run full collections while no request runs, and rarely otherwise, until cancelled. Python's own full collections
    are switched off meanwhile.

    A full collection visits all objects and stops the process while it does. With 1,000 open streams this takes 0.3 s,
    and Python would do it every few seconds. The younger generations are collected as usual. Nearly all objects need no
    collection, because they are freed with their last reference.

    Args:
        running: function that returns the number of requests that run.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    last = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if is_due(gc.get_count()[2], time.monotonic() - last, running()):
                gc.collect()
                last = time.monotonic()
    finally:
        gc.set_threshold(*before)


def is_due(collections: int, seconds: float, running: int) -> bool:
    """Return whether a full collection should run now.

    Args:
        collections: number of collections of the middle generation since the last full collection.
        seconds: time since the last full collection, in seconds.
        running: number of requests that run now.
    """
    return collections >= WORTHWHILE and (running == 0 or seconds >= BUSY_SECONDS)
