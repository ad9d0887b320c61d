"""The source's side of UCX: a thread that sends slots of the arena to readers that have the offer's token."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field

from paceline.services.kvtransfer.transports.transport import ArenaMemory
from paceline.services.kvtransfer.transports.ucx_wire import REQUEST_BYTES, TOKEN_BYTES, Offer, parse_request
from paceline.services.kvtransfer.transports.ucx_worker import Handle, UcxWorker, failure

_MOST_READERS = 256
_LOOK_SECONDS = 0.2
_CLOSE_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass
class _Reader:
    """The connection of a reader. Its next request is served after all slots of the last one have been sent."""

    endpoint: Handle
    request: bytearray
    asking: Handle
    sending: deque[Handle] = field(default_factory=deque)


class UcxServing:
    """Owns the listening UCX worker, and the only thread that uses it, from construction to `close`."""

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory
        self._worker = UcxWorker()
        self._arrivals: list[int] = []
        self._readers: list[_Reader] = []
        port = self._worker.listen(self._arrivals.append)
        self.offer = Offer(port, memory.slot_bytes, secrets.token_bytes(TOKEN_BYTES))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ucx-serving", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sending, and wait until the thread has ended, for at most _CLOSE_SECONDS."""
        self._stopping.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("UCX does not stop sending; its thread goes on")

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._worker.progress()
                if not self._accept() and not sum(map(self._attend, tuple(self._readers))):
                    self._worker.sleep(_LOOK_SECONDS)
        except Exception:
            log.exception("UCX failed; other hosts read from here by other transports")
        finally:
            readers, self._readers = self._readers, []
            endpoints = [reader.endpoint for reader in readers]
            messages = [message for reader in readers for message in (reader.asking, *reader.sending)]
            readers.clear()
            self._worker.close(endpoints, messages)

    def _accept(self) -> bool:
        """Accept a connection, if there is one. Return whether there was."""
        if not self._arrivals:
            return False
        arrival, request = self._arrivals.pop(), bytearray(REQUEST_BYTES)
        try:
            endpoint = self._worker.accept(arrival)
            self._readers.append(_Reader(endpoint, request, self._worker.receive(endpoint, request)))
        except self._worker.error as error:
            log.debug("a UCX reader left before it was accepted: %s", error)
        if len(self._readers) > _MOST_READERS:
            log.warning("more than %d UCX readers: the oldest one is disconnected", _MOST_READERS)
            self._drop(self._readers[0])
        return True

    def _attend(self, reader: _Reader) -> bool:
        """Serve a reader as far as possible now. Return whether there was anything to do."""
        failed = ""
        while not failed and reader.sending and reader.sending[0].completed:
            failed = failure(reader.sending.popleft())
        asks = reader.asking.completed and not reader.sending
        if asks and not failed:
            failed = failure(reader.asking) or self._answer(reader)
        if failed or not reader.endpoint.alive:
            log.debug("a UCX reader is gone: %s", failed)
            self._drop(reader)
            return True
        return bool(asks)

    def _drop(self, reader: _Reader) -> None:
        """Disconnect a reader. Messages that are being sent to it fail later, in the worker's progress."""
        self._readers.remove(reader)
        reader.endpoint.close_blocking()

    def _answer(self, reader: _Reader) -> str:
        """Send the requested slots. Return the reason if this failed; otherwise an empty string."""
        try:
            wanted = parse_request(reader.request, self.offer.token, self._memory.slots)
        except ValueError as error:
            log.warning("refused a UCX reader: %s", error)
            return str(error)
        try:
            for tag, slot in enumerate(wanted):
                reader.sending.append(self._worker.send_tagged(reader.endpoint, self._memory.slot(slot), tag))
            reader.asking = self._worker.receive(reader.endpoint, reader.request)
        except self._worker.error as error:
            return str(error)
        return ""
