"""Messages between the gateway and a process that decodes: a JSON object and some bytes, over a socket.

A hostile file may control the process, so nothing of its answer is trusted. The functions that check an answer raise
ValueError, KeyError, TypeError or OverflowError if it contradicts itself.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


_FORMS: Mapping[str, tuple[type[np.generic], int, tuple[str, ...]]] = {
    "image": (np.uint8, 3, ()),
    "video": (np.uint8, 4, ("timestamps",)),
    "audio": (np.float32, 1, ()),
}
"""For each kind of item: the type of its array, the array's number of dimensions, and the names of the item's facts."""

Facts: TypeAlias = dict[str, NDArray[np.float64]]
"""A decoder's facts about an item besides its array, by name: for a video `timestamps` of its frames, in seconds."""


def facts_of(kind: str, answer: dict[str, Any], length: int) -> Facts:
    """Return the facts of an answer. Each fact has one number for every element of the array's first axis."""
    _, _, names = _FORMS[kind]
    facts = {name: np.array(values, np.float64) for name, values in dict(answer["facts"]).items()}
    fits = all(values.shape == (length,) and np.isfinite(values).all() for values in facts.values())
    if facts.keys() != set(names) or not fits:
        raise ValueError("the facts do not fit the array")
    return facts


def array_of(kind: str, answer: dict[str, Any], payload: memoryview) -> NDArray[Any]:
    """Return the decoded item of an answer: its payload in the shape that the answer names."""
    shape, dtype = tuple(answer["shape"]), np.dtype(answer["dtype"])
    wanted, dimensions, _ = _FORMS[kind]
    if dtype != wanted or len(shape) != dimensions or (dimensions > 1 and shape[-1] != 3) or min(shape) < 1:
        raise ValueError(f"it is no array of the kind {kind}")
    if math.prod(shape) * dtype.itemsize != len(payload):
        raise ValueError("the array has another size than its shape says")
    return np.frombuffer(payload, dtype).reshape(shape)


def size_of(answer: dict[str, Any]) -> tuple[int, int]:
    """Return the height and width of an image, which a decoder tells before it sends the pixels."""
    height, width = answer["size"]
    if not (type(height) is type(width) is int and height > 0 and width > 0):
        raise ValueError("the image has no size")
    return height, width
