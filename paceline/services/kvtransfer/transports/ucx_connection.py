"""The reader's side of UCX: a connection to a source, for one read at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.kvtransfer.transports.ucx_wire import MOST_SLOTS, Offer, pack_request
from paceline.services.kvtransfer.transports.ucx_worker import Handle, UcxWorker, failure

BATCH_BYTES = 16 << 20
"""Largest number of bytes that are requested at once, so that each deadline covers at most this many bytes."""
_LOOK_SECONDS = 0.02


class Abandoned(Exception):
    """Raised by a read that was given up because nobody waits for it any more."""


class UcxConnection:
    """A UCX worker of its own with an endpoint at one source.

    Closing the connection ends all its messages and the worker. After this, no transfer touches memory any more,
    whatever its state was.

    Raises:
        UnavailableError: UCX does not start, or cannot begin to connect.
    """

    def __init__(self, ip: str, offer: Offer) -> None:
        self._offer = offer
        try:
            self._worker = UcxWorker()
        except ConfigError as error:
            raise UnavailableError(str(error)) from error
        self._endpoints: list[Handle] = []
        self._request = pack_request(offer.token, [])  # a greeting, which requests no slots
        self._sending: list[Handle] = []
        self._receiving: list[Handle] = []
        try:
            self._endpoints.append(self._worker.connect(ip, offer.port))
            self._sending.append(self._worker.send(self._endpoints[0], self._request))
        except self._worker.error as error:
            raise UnavailableError(str(error)) from error

    @property
    def opening(self) -> bool:
        """Whether a message to the source is still to be sent. The first such message is the greeting.

        Do not close such a connection if the source is to be read again, because a send cannot be cancelled.
        """
        return bool(self._sending)

    def stands(self) -> bool:
        """Return whether the connection still seems to be open."""
        try:
            self._worker.progress()
        except self._worker.error:
            return False
        return bool(self._endpoints[0].alive)

    def read(
        self, pairs: Sequence[tuple[int, memoryview]], abandoned: Callable[[], bool], silence_seconds: float
    ) -> None:
        """Read slots of the source.

        If this raises, close the connection before the memory is used again, unless the connection is `opening`.

        Args:
            pairs: for each block, its slot in the source and the memory for its bytes.
            abandoned: returns whether to give up.
            silence_seconds: longest time without progress.

        Raises:
            UnavailableError: the source is gone, or was silent for too long.
            Abandoned: `abandoned` returned True.
        """
        at_once = max(1, min(MOST_SLOTS, BATCH_BYTES // self._offer.slot_bytes))
        try:
            self._wait(lambda: len(self._sending), abandoned, silence_seconds)
            for start in range(0, len(pairs), at_once):
                self._read_batch(pairs[start : start + at_once], abandoned, silence_seconds)
        except self._worker.error as error:
            raise UnavailableError(str(error)) from error

    def close(self) -> None:
        """End the connection. It touches no memory from now on."""
        self._sending.clear()
        self._worker.close(self._endpoints, self._receiving)

    def _read_batch(
        self, pairs: Sequence[tuple[int, memoryview]], abandoned: Callable[[], bool], silence_seconds: float
    ) -> None:
        self._request = pack_request(self._offer.token, [slot for slot, _ in pairs])
        self._sending.append(self._worker.send(self._endpoints[0], self._request))
        wanted = {tag: into for tag, (_, into) in enumerate(pairs)}

        def left() -> int:
            self._receive_arrived(wanted)
            return len(wanted) + len(self._receiving)

        self._wait(left, abandoned, silence_seconds)

    def _receive_arrived(self, wanted: dict[int, memoryview]) -> None:
        while arrived := self._worker.arrived_tagged():
            into = wanted.pop(int(arrived.sender_tag.value), None)
            if into is None or arrived.length != len(into):
                raise UnavailableError("the source sent a block that was not requested")
            self._receiving.append(self._worker.receive_tagged(arrived, into))

    def _wait(self, left: Callable[[], int], abandoned: Callable[[], bool], silence_seconds: float) -> None:
        """Wait until `left` returns 0. The deadline starts again whenever it returns less than before."""
        heard_at, fewest = time.monotonic(), left() + 1
        while True:
            self._sending = still_under_way(self._sending)
            self._receiving = still_under_way(self._receiving)
            if not (now_left := left()):
                return
            if now_left < fewest:
                heard_at, fewest = time.monotonic(), now_left
            if abandoned():
                raise Abandoned
            if not self._endpoints[0].alive:
                raise UnavailableError("the connection broke, or the source refused")
            if time.monotonic() - heard_at > silence_seconds:
                raise UnavailableError(f"nothing came for {silence_seconds:g} s")
            self._worker.sleep(_LOOK_SECONDS)
            self._worker.progress()


def still_under_way(messages: list[Handle]) -> list[Handle]:
    """Return the messages that are not completed.

    Raises:
        UnavailableError: a completed message failed. An error keeps the frames of its traceback alive, so no local
            variable here refers to a message.
    """
    if failures := [why for message in messages if message.completed and (why := failure(message))]:
        raise UnavailableError(f"a message failed: {failures[0]}")
    return [message for message in messages if not message.completed]
