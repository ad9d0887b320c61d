"""A Unix socket for the events of gateways on the same host.

gRPC has threads of its own in both processes. For one message these threads take longer than the rest of a token's
path.
"""

from __future__ import annotations

import asyncio
import logging

from google.protobuf.message import DecodeError

from paceline.core.errors import InvalidRequestError
from paceline.proto import worker_pb2
from paceline.services.common.unix_socket import Framed
from paceline.services.decode.outbox import Outboxes

log = logging.getLogger(__name__)


class EventConnection(Framed):
    """The connection of one gateway. It sends one EventsRequest and reads the messages of `Decode.Events`."""

    def __init__(self, outboxes: Outboxes) -> None:
        super().__init__(self._take, self._end)
        self._outboxes = outboxes
        self._serving: asyncio.Task[None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    def _take(self, message: bytes) -> None:
        try:
            if self._serving is not None:
                raise InvalidRequestError("this connection has asked for a stream of events already")
            name = worker_pb2.EventsRequest.FromString(message).stream
            self._serving = asyncio.get_running_loop().create_task(self._serve(name))
        except (InvalidRequestError, DecodeError) as error:
            self._refuse(error)

    async def _serve(self, name: str) -> None:
        try:
            await self._outboxes.serve(name, self._write)
        except InvalidRequestError as error:
            self._refuse(error)
        finally:
            self.close()

    async def _write(self, message: worker_pb2.DecodeEvents) -> None:
        await self._has_room.wait()
        self.send(message)

    def _refuse(self, error: Exception) -> None:
        log.warning("the connection of a gateway is closed: %s", error)
        self.abort()

    def _end(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    # ---- called by the event loop if the gateway reads slowly

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()
