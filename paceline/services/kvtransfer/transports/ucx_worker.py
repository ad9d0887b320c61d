"""A worker of the UCX library, with the operations that the service needs."""

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
"""An object of the library, whose binding has no types."""


def load_ucx() -> Any:
    """Return the library's binding.

    Raises:
        ConfigError: the binding is not installed, or cannot be loaded.
    """
    quiet_ucx()
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except (ImportError, OSError) as error:
        raise ConfigError(f"UCX cannot be loaded ({error}); install it with: pip install 'paceline[ucx]'") from error


class UcxWorker:
    """A UCX worker with its sockets, its endpoints and the messages in flight.

    Only one thread may use it at a time. Over TCP, bytes move only during `progress`; over other networks they may move
    at any time. After `close`, no bytes move.

    Raises:
        ConfigError: UCX is not installed, or does not start.
    """

    def __init__(self) -> None:
        self._api = load_ucx()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self.error: type[Exception] = self._api.UCXError
        """The exception that the other methods raise."""
        features = self._api.Feature
        # No remote memory access: with it, over TCP, a peer could read and write any address of this process.
        flags = (features.TAG, features.STREAM, features.WAKEUP)
        try:
            self._worker = self._api.UCXWorker(self._api.UCXContext({}, feature_flags=flags))
            self._worker.init_blocking_progress_mode()
        except self.error as error:
            raise ConfigError(f"UCX does not start: {error}") from error
        self._listener: Handle = None

    def listen(self, arrived: Callable[[int], object]) -> int:
        """Listen for connections, and return the port.

        The library can listen only on all addresses of the machine. `progress` calls `arrived` with each new
        connection, which is the argument of `accept`.
        """
        try:
            self._listener = self._api.UCXListener.create(self._worker, 0, arrived)
        except self.error as error:
            raise ConfigError(f"UCX does not listen: {error}") from error
        return int(self._listener.port)

    def accept(self, arrival: int) -> Handle:
        return self._listener.create_endpoint_from_conn_request(arrival, True)

    def connect(self, ip: str, port: int) -> Handle:
        """Return a new endpoint. There is no error if nothing listens there; messages on the endpoint then fail
        later.
        """
        return self._worker.create_endpoint_from_hostname(ip, port, True)

    def send_tagged(self, endpoint: Handle, data: memoryview, tag: int) -> Handle:
        return endpoint.tag_send(self._array(data), self._api.UCXXTag(tag))

    def arrived_tagged(self) -> Handle | None:
        """Return a tagged message that has come, or None. It has a `length` in bytes and a `sender_tag`."""
        found = self._worker.tag_probe(self._api.UCXXTag(0), self._api.UCXXTagMask(0), True)
        return found if found.matched else None

    def receive_tagged(self, arrived: Handle, into: memoryview) -> Handle:
        """Receive a message that has come. A receive without a sent message could not be cancelled."""
        return self._worker.tag_recv_with_handle(self._array(into), arrived)

    def send(self, endpoint: Handle, data: bytes | bytearray) -> Handle:
        """Send on the endpoint's stream. The caller keeps the data until the message is completed."""
        return endpoint.stream_send(self._array(data))

    def receive(self, endpoint: Handle, into: bytearray) -> Handle:
        """Receive as many bytes as `into` has from the endpoint's stream."""
        return endpoint.stream_recv(self._array(into))

    def progress(self) -> None:
        """Send and receive as far as possible now."""
        self._worker.progress()

    def sleep(self, seconds: float) -> None:
        """Wait until `progress` has work, for at most `seconds`. Before the call, look for messages that `progress` has
        completed.
        """
        if self._worker.arm():
            select.select([self._worker.epoll_file_descriptor], [], [], seconds)

    def close(self, endpoints: list[Handle], messages: list[Handle]) -> None:
        """Close the endpoints by force, then wait until the messages in flight have failed, then end the worker.

        Both lists are emptied. The caller must have no other handles of this worker. Completed messages, whatever their
        result, touch no memory any more. If one was still being sent, the library (0.52) leaks some descriptors.
        """
        for endpoint in endpoints:
            with contextlib.suppress(self.error):  # the endpoint has failed already
                endpoint.close_blocking()
        deadline = time.monotonic() + _END_SECONDS
        while any(not message.completed for message in messages):
            if time.monotonic() > deadline:
                log.error("UCX does not end its messages; over TCP no bytes move any more even so")
                break
            self.progress()
            time.sleep(0.0005)
        messages.clear()
        endpoints.clear()
        self._listener = None
        self._worker = None


def failure(message: Handle) -> str:
    """Return why a completed message failed; an empty string if it did not."""
    try:
        message.check_error()
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
