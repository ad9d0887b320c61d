"""How a service process begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from paceline.core.config import ServiceConfig
from paceline.core.errors import ConfigError
from paceline.services.common.registry import connect

UNDO_SECONDS = 5.0
"""For a start that was cancelled to undo what it has done."""

_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of documentation (RFC 5737, RFC 3849): the way there is the default route."""
_ANY_PORT = 9

Started = TypeVar("Started")

log = logging.getLogger(__name__)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second signal ends the process at once."""
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
    """The result of `start`. Where `stop` is set first, `start` is cancelled and the process ends with exit code 0."""
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
    """host:port under which others reach this service. Raises ConfigError where that cannot be told."""
    host = (config.advertise or config.host).strip("[]")
    if host in ("0.0.0.0", "::"):
        own = best_address(_own_addresses(config.redis, socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC))
        if own is None:
            raise ConfigError(
                f"cannot tell under which address others reach {socket.gethostname()}; add --advertise HOST"
            )
        host = own
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def best_address(candidates: Sequence[str]) -> str | None:
    """The first address that is good beyond this machine, else the first."""
    for address in candidates:
        kind = ipaddress.ip_address(address)
        # A link-local address needs a scope, which others do not have.
        if not kind.is_loopback and not kind.is_link_local:
            return address
    return candidates[0] if candidates else None


def announce_ready(config: ServiceConfig, address: str) -> None:
    """Tells whoever started this process, if it asked, that requests may come."""
    # What is there by now stays. To go through all of torch's objects again takes the garbage collector some 50 ms, in
    # which this process runs no other Python.
    gc.collect()
    gc.freeze()
    if config.ready_fd >= 0:
        os.write(config.ready_fd, f"{address}\n".encode())
        os.close(config.ready_fd)


def unique_name(role: str) -> str:
    return f"{role}-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"


def _own_addresses(redis: str, family: socket.AddressFamily) -> list[str]:
    """Our ends of the ways out, the best first: who shares the Redis reaches us at our end of the way to it.

    The host's name is not asked: /etc/hosts may give it a loopback address.
    """
    redis_host = str(connect(redis).connection_pool.connection_kwargs.get("host", "localhost"))
    addresses = []
    for host in (redis_host, *_ANYWHERE):
        with contextlib.suppress(OSError):  # no such name, or no way there
            for kind, *_, target in socket.getaddrinfo(host, _ANY_PORT, family, socket.SOCK_DGRAM):
                with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                    probe.connect(target)  # UDP: looks up the way and sends nothing
                    addresses.append(str(probe.getsockname()[0]))
    return addresses
