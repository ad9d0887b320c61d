"""The library: one worker of UCX, and all that the service wants of it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import select
import time
from collections.abc import Callable
from typing import Any

from paceline.core.env import quiet_ucx
from paceline.core.errors import ConfigError

_END_SECONDS = 2.0

log = logging.getLogger(__name__)

Handle = Any
"""An object of the library, which has no types."""


def load_ucx() -> Any:
    """The library's binding.

    Raises:
        ConfigError: it is not installed, or cannot be loaded.
    """
    quiet_ucx()
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except (ImportError, OSError) as error:
        raise ConfigError(f"UCX is not there ({error}); install it with: pip install 'paceline[ucx]'") from error


class UcxWorker:
    """One worker, with its sockets, endpoints and messages in flight.

    Used by one thread at a time. Over TCP bytes move in `progress` alone, with other networks at any time; none
    move once `close` is through.

    Raises:
        ConfigError: UCX is not installed, or does not start.
    """

    def __init__(self) -> None:
        self._api = load_ucx()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self.error: type[Exception] = self._api.UCXError
        """What the other methods raise."""
        features = self._api.Feature
        # No remote memory access: with it, over TCP, UCX reads and writes this process at any address a peer names.
        flags = (features.TAG, features.STREAM, features.WAKEUP)
        try:
            self._worker = self._api.UCXWorker(self._api.UCXContext({}, feature_flags=flags))
            self._worker.init_blocking_progress_mode()
        except self.error as error:
            raise ConfigError(f"UCX does not start: {error}") from error
        self._listener: Handle = None

    def listen(self, arrived: Callable[[int], object]) -> int:
        """Accepts connections at the port that is returned, on all of the machine's addresses: the library knows no
        other way. `arrived` is called in `progress`, with what `accept` takes."""
        try:
            self._listener = self._api.UCXListener.create(self._worker, 0, arrived)
        except self.error as error:
            raise ConfigError(f"UCX does not listen: {error}") from error
        return int(self._listener.port)

    def accept(self, arrival: int) -> Handle:
        return self._listener.create_endpoint_from_conn_request(arrival, True)

    def connect(self, ip: str, port: int) -> Handle:
        """An endpoint. Whether somebody is there shows later."""
        return self._worker.create_endpoint_from_hostname(ip, port, True)

    def send_tagged(self, endpoint: Handle, data: memoryview, tag: int) -> Handle:
        return endpoint.tag_send(self._array(data), self._api.UCXXTag(tag))

    def arrived_tagged(self) -> Handle | None:
        """A tagged message that came, for `receive_tagged`: its `length` in bytes, its `sender_tag`."""
        found = self._worker.tag_probe(self._api.UCXXTag(0), self._api.UCXXTagMask(0), True)
        return found if found.matched else None

    def receive_tagged(self, arrived: Handle, into: memoryview) -> Handle:
        """Memory is not touched before somebody has sent: a message that none answers could not be called off."""
        return self._worker.tag_recv_with_handle(self._array(into), arrived)

    def send(self, endpoint: Handle, data: bytes | bytearray) -> Handle:
        """Sends on the endpoint's stream. The caller keeps the data until it is completed."""
        return endpoint.stream_send(self._array(data))

    def receive(self, endpoint: Handle, into: bytearray) -> Handle:
        """Receives all these bytes from the endpoint's stream."""
        return endpoint.stream_recv(self._array(into))

    def progress(self) -> None:
        """Moves what can be moved now."""
        self._worker.progress()

    def sleep(self, seconds: float) -> None:
        """Until there is something to move, or so many seconds. Look at what `progress` has completed before."""
        if self._worker.arm():
            select.select([self._worker.epoll_file_descriptor], [], [], seconds)

    def close(self, endpoints: list[Handle], messages: list[Handle]) -> None:
        """Ends everything: the endpoints first, by force, then the messages under way, which fail, then the worker.

        Both lists are emptied; the caller has no other handle of this worker. Messages that are through, with whatever
        result, touch no memory any more. Where one was being sent meanwhile, the library (0.52) keeps some descriptors.
        """
        for endpoint in endpoints:
            with contextlib.suppress(self.error):  # it has failed already
                endpoint.close_blocking()
        deadline = time.monotonic() + _END_SECONDS
        while any(not message.completed for message in messages):
            if time.monotonic() > deadline:
                log.error("UCX does not end what is under way; over TCP nothing moves any more all the same")
                break
            self.progress()
            time.sleep(0.0005)
        messages.clear()
        endpoints.clear()
        self._listener = None
        self._worker = None


def failure(message: Handle) -> str:
    """Why a completed message failed; empty where it did not."""
    try:
        message.check_error()
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
