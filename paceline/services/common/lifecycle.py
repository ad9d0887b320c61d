"""How a service process begins and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import uuid

from paceline.core.config import ServiceConfig
from paceline.core.errors import ConfigError


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


def reachable_address(config: ServiceConfig, port: int) -> str:
    """host:port under which others reach this service."""
    host = config.advertise or config.host
    if host in ("0.0.0.0", "::"):
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise ConfigError(
                f"cannot tell under which address others reach {socket.gethostname()}; name it with --advertise"
            ) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def announce_ready(config: ServiceConfig, address: str) -> None:
    """Tells whoever started this process, if it asked, that requests may come."""
    if config.ready_fd >= 0:
        os.write(config.ready_fd, f"{address}\n".encode())
        os.close(config.ready_fd)


def unique_name(role: str) -> str:
    return f"{role}-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
