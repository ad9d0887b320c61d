"""The Unix socket of a host, through which its workers send batches of operations on leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from paceline.core.errors import PacelineError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.unix_socket import Framed, UnixListener

log = logging.getLogger(__name__)


class HostSocket(UnixListener):
    """The socket for the requests of workers. Each request names a session, whose number only its worker knows.

    Args:
        folder: folder of the arena, which all workers of the host can access.
        serve: called with each request, in the order of its connection, and with the reply to call now or later. If it
            raises PacelineError, because the request is invalid, the connection is closed.
    """

    def __init__(self, folder: Path, serve: Callable[[pb.BatchRequest, Reply], None]) -> None:
        super().__init__(folder, lambda: _Connection(serve))


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one request. Call it with the message."""

    connection: Framed
    request_id: int

    def __call__(self, reply: pb.BatchReply) -> None:
        """Send the reply. Do nothing if the connection has ended."""
        reply.id = self.request_id
        self.connection.send(reply)

    def can_be_sent(self) -> bool:
        return self.connection.is_open


class _Connection(Framed):
    """The connection of one worker, which sends batches and gets their replies."""

    def __init__(self, serve: Callable[[pb.BatchRequest, Reply], None]) -> None:
        super().__init__(self._take)
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._is_full = False

    def _take(self, message: bytes) -> None:
        try:
            request = pb.BatchRequest.FromString(message)
            self._serve(request, Reply(self, request.id))
        except (PacelineError, DecodeError) as error:
            log.warning("the connection of a worker is closed: %s", error)
            self.abort()
        except Exception:
            log.exception("unexpected error in a request")
            self.abort()
        self.waits = True  # serve other connections before this one's next request
        self._loop.call_soon(self._go_on)

    # Read no more requests while the worker does not read its replies.

    def pause_writing(self) -> None:
        self._is_full = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        if self.transport is not None:
            self.transport.resume_reading()
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_full:
            self.waits = False
            self.go_on()
