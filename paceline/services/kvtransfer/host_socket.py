"""The Unix socket of a host, on which its workers ask for blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from paceline.core.errors import PacelineError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.framed import Framed
from paceline.services.common.unix_listener import UnixListener

Answer: TypeAlias = pb.BatchReply | Coroutine[Any, Any, pb.BatchReply]

log = logging.getLogger(__name__)


class HostSocket(UnixListener):
    """Where requests come. Each names a session, which only its worker knows.

    Args:
        folder: that of the arena, which all workers of the host see.
        serve: takes a request, in the order of a connection; returns the reply, or what gives it later. Raises
            PacelineError for one that cannot be taken, which ends the connection.
    """

    def __init__(self, folder: Path, serve: Callable[[pb.BatchRequest], Answer]) -> None:
        super().__init__(folder, lambda: _Connection(serve))


class _Connection(Framed):
    """One worker's."""

    def __init__(self, serve: Callable[[pb.BatchRequest], Answer]) -> None:
        super().__init__(self._take, self._end)
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_full = False

    def _take(self, message: bytes) -> None:
        with self._ending():
            request = pb.BatchRequest.FromString(message)
            answer = self._serve(request)
            if isinstance(answer, pb.BatchReply):
                # Behind those who have waited for what this request did, and before anything else is done here.
                self.waits = True
                self._loop.call_soon(self._reply_now, request.id, answer)
            else:
                task = self._loop.create_task(self._reply_later(request.id, answer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _reply_now(self, request_id: int, reply: pb.BatchReply) -> None:
        self._reply(request_id, reply)
        self._go_on()

    async def _reply_later(self, request_id: int, answer: Coroutine[Any, Any, pb.BatchReply]) -> None:
        with self._ending():
            self._reply(request_id, await answer)

    def _reply(self, request_id: int, reply: pb.BatchReply) -> None:
        reply.id = request_id
        self.send(reply)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Ends the connection where a request cannot be taken."""
        try:
            yield
        except (PacelineError, DecodeError) as error:
            log.warning("a worker's connection is ended: %s", error)
            self.abort()
        except Exception:
            log.exception("unexpected error in a request")
            self.abort()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()

    # Who does not take replies cannot ask for more of them.

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
