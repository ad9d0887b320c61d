"""Messages between the gateway and a process that decodes: a JSON object and some bytes, over a socket."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

import numpy as np

_SIZES = struct.Struct(">IQ")
"""Head of a message: the lengths of its JSON text and of its payload, in bytes."""
_MAX_HEADER_BYTES = 1 << 20


class ChannelError(Exception):
    """The other process has ended, or has sent bytes that are not a message."""


class Channel:
    """One end of the socket between the gateway and a process that decodes. Calls block."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(
        self, header: dict[str, Any], payload: bytes | bytearray | memoryview = b"", seconds: float | None = None
    ) -> None:
        """Send a message. Raises OSError, or its subclass TimeoutError if sending takes longer than `seconds`."""
        text = json.dumps(header).encode()
        deadline = None if seconds is None else time.monotonic() + seconds
        for part in (_SIZES.pack(len(text), len(payload)) + text, payload):
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(part)

    def receive(self, max_bytes: int, seconds: float | None = None) -> tuple[dict[str, Any], memoryview]:
        """Wait for the next message. Return its header and its payload.

        Raises:
            ChannelError: the connection has ended, or the message is malformed or has a larger payload.
            TimeoutError: the message has not come within `seconds`.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        header_bytes, payload_bytes = _SIZES.unpack(self._read(_SIZES.size, deadline))
        if header_bytes > _MAX_HEADER_BYTES or payload_bytes > max_bytes:
            raise ChannelError("the message is too large")
        try:
            header = json.loads(bytes(self._read(header_bytes, deadline)))
        except ValueError as error:
            raise ChannelError(f"the message is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise ChannelError("the message is not a JSON object")
        return header, self._read(payload_bytes, deadline)

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int, deadline: float | None) -> memoryview:
        # Python's own buffers would be filled with zeros first, and no other thread could run meanwhile.
        data = np.empty(count, np.uint8).data
        view = data
        while len(view):
            self._socket.settimeout(_left(deadline))
            received = self._socket.recv_into(view)
            if not received:
                raise ChannelError("the connection was closed")
            view = view[received:]
        return data


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline on time.monotonic(); None for none. Raises TimeoutError if it has passed."""
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
