"""The Unix socket of a host, on which its workers ask for blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from paceline.core.errors import PacelineError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.framed import Framed
from paceline.services.common.unix_listener import UnixListener

log = logging.getLogger(__name__)


class HostSocket(UnixListener):
    """Where requests come. Each names a session, which only its worker knows.

    Args:
        folder: that of the arena, which all workers of the host see.
        serve: takes a request, in the order of a connection, and replies at once or later. Raises PacelineError for one
            that cannot be taken, which ends the connection.
    """

    def __init__(self, folder: Path, serve: Callable[[pb.BatchRequest, Reply], None]) -> None:
        super().__init__(folder, lambda: _Connection(serve))


class Reply:
    """To one request: call it with the message."""

    def __init__(self, connection: Framed, request_id: int) -> None:
        self._connection = connection
        self._request_id = request_id

    def __call__(self, reply: pb.BatchReply) -> None:
        """Does nothing where nobody hears it."""
        reply.id = self._request_id
        self._connection.send(reply)

    def is_heard(self) -> bool:
        return self._connection.is_open


class _Connection(Framed):
    """One worker's."""

    def __init__(self, serve: Callable[[pb.BatchRequest, Reply], None]) -> None:
        super().__init__(self._take)
        self._serve = serve

    def _take(self, message: bytes) -> None:
        try:
            request = pb.BatchRequest.FromString(message)
            self._serve(request, Reply(self, request.id))
        except (PacelineError, DecodeError) as error:
            log.warning("a worker's connection is ended: %s", error)
            self.abort()
        except Exception:
            log.exception("unexpected error in a request")
            self.abort()

    # Who does not take replies cannot ask for more of them.

    def pause_writing(self) -> None:
        self.waits = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.waits = False
        if self.transport is not None:
            self.transport.resume_reading()
        self.go_on()
