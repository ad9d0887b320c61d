"""The gateway process: start, serving, drain and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Iterator

import uvicorn

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.core.machine import give_back_large_memory, raise_file_limit
from paceline.services.common.lifecycle import announce_ready, start_unless_stopped, stop_on_signals
from paceline.services.gateway.app import create_app
from paceline.services.gateway.gateway import Gateway, load_models
from paceline.services.gateway.http.listener import BoundedHttp, Listener, listen

LAST_WORDS_SECONDS = 5
"""Time after the drain in which the last bytes can reach their clients, in seconds."""

SWITCH_SECONDS = 0.001
"""Time after which a computing thread lets the event loop run, in seconds. Python's default of 5 ms is as long as a
decode step, and would delay tokens."""

NOTICE_SECONDS = 5.0
"""Time at the beginning of a drain in which new connections are still accepted and their requests refused, in seconds.
Load balancers that poll /health then notice the drain before clients do."""

log = logging.getLogger(__name__)


async def run(config: GatewayConfig, stop: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set, then drain and return. By default SIGTERM and SIGINT set `stop`.

    Raises:
        ConfigError: the address is in use, or the configuration is invalid.
        ModelError: the model's folder holds no usable tokenizer.
    """
    stop = stop or stop_on_signals()
    sys.setswitchinterval(SWITCH_SECONDS)
    give_back_large_memory()  # files of media, and what is decoded of them, are large
    raise_file_limit()  # each worker is a connection, and so is each client
    with listen(config) as listener:
        models = await start_unless_stopped(asyncio.to_thread(load_models, config), stop)
        gateway = Gateway(config, models, listener.address)
        await start_unless_stopped(gateway.prepare(), stop)
        server = _Server(
            uvicorn.Config(
                create_app(gateway),
                http=BoundedHttp,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                # Anybody can send the headers of a proxy, so they do not replace the peer's address, see `Guard`.
                proxy_headers=False,
                # Clients keep connections open for longer than the default of 5 s. If the server closes one just as the
                # client sends, that request is lost.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            ),
            listener,
        )
        serving = asyncio.create_task(server.serve())
        # The wait below must end even if the server fails before it calls startup().
        serving.add_done_callback(lambda _: server.tried_to_start.set())
        stopping = asyncio.create_task(stop.wait())
        try:
            await server.tried_to_start.wait()
            if not server.started:
                raise ConfigError("the gateway could not start; its log says why")
            log.info("serving %s at %s", ", ".join(gateway.models), listener.url)
            announce_ready(config, listener.address)
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                log.info("draining for up to %g seconds", config.drain_seconds)
                asyncio.get_running_loop().call_later(NOTICE_SECONDS, server.stop_listening)
                await gateway.drain(config.drain_seconds)
        finally:
            stopping.cancel()
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """A server that leaves signals alone, because the gateway drains before the server ends.

    `tried_to_start` is set when startup has succeeded or failed.
    """

    def __init__(self, config: uvicorn.Config, listener: Listener) -> None:
        super().__init__(config)
        self._listener = listener
        self.tried_to_start = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            # uvicorn starts the application but opens no socket: it neither renews certificates nor bounds handshakes.
            await super().startup([])
            self.servers.append(await self._listener.serve(self._make_protocol))
        finally:
            self.tried_to_start.set()

    def stop_listening(self) -> None:
        """Accept no more connections. Open connections stay open."""
        for server in self.servers:
            server.close()

    def _make_protocol(self) -> asyncio.Protocol:
        return BoundedHttp(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
