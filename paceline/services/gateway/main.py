"""The gateway as a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.core.machine import give_back_large_memory
from paceline.services.common.lifecycle import announce_ready, reachable_address, start_unless_stopped, stop_on_signals
from paceline.services.gateway.app import create_app
from paceline.services.gateway.gateway import Gateway, load_tokenizer
from paceline.services.gateway.middleware import BoundedHttp

LAST_WORDS_SECONDS = 5
"""Time after the drain in which the last bytes can reach their clients."""

log = logging.getLogger(__name__)


async def run(config: GatewayConfig, stop: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set, then drain and return. By default SIGTERM and SIGINT set `stop`.

    Raises:
        ConfigError: the port is taken, or the configuration is invalid.
        ModelError: the model's folder holds no usable tokenizer.
    """
    stop = stop or stop_on_signals()
    give_back_large_memory()  # files of media, and what is decoded of them, are large
    listener = _listen(config.host, config.port)
    with contextlib.closing(listener):
        address = reachable_address(config, listener.getsockname()[1])
        tokenizer = await start_unless_stopped(asyncio.to_thread(load_tokenizer, config), stop)
        gateway = Gateway(config, tokenizer, address)
        server = _Server(
            uvicorn.Config(
                create_app(gateway),
                http=BoundedHttp,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                # Clients keep connections open for longer than the default of 5 s. If the server closes one just as the
                # client sends, that request is lost.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        # The wait below must end even if the server fails before it calls startup().
        serving.add_done_callback(lambda _: server.tried_to_start.set())
        stopping = asyncio.create_task(stop.wait())
        try:
            await server.tried_to_start.wait()
            if not server.started:
                raise ConfigError("the gateway could not start; its log says why")
            log.info("serving %s at http://%s", gateway.model, address)
            announce_ready(config, address)
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                log.info("draining for up to %g seconds", config.drain_seconds)
                await gateway.drain(config.drain_seconds)
        finally:
            stopping.cancel()
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """A server that leaves signals alone, because the gateway drains before the server ends.

    `tried_to_start` is set when startup has succeeded or failed.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.tried_to_start = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.tried_to_start.set()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio's own loop disables Nagle's algorithm on accepted connections only if the protocol is named here.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Binding alone does not claim the port: another socket with SO_REUSEADDR may bind it too.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port with --port"
        ) from error
    return listener
