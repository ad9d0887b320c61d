"""A worker's encoders: they compute encodings one at a time, between the engine's steps, and count them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import torch

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.core.media import MediaInput
from paceline.core.metrics import Family, Sample
from paceline.engine.compute_thread import EncodeJob
from paceline.kernels.encoding import Between
from paceline.models.encoders.base import Encoders


class AbandonedError(UnavailableError):
    """The error of work that was given up, because nobody waits for its result any more."""

    def __init__(self) -> None:
        super().__init__("nobody waits for this work any more")


class FairTurns:
    """Gives one turn at a time. Owners that wait are served in rotation, and the turns of one owner in order."""

    def __init__(self) -> None:
        self.is_taken = False
        """Whether somebody has the turn, or is about to get it."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting turns of each owner. The first owner is served next."""

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a turn."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, abandoned: asyncio.Event) -> AsyncIterator[None]:
        """Wait for a turn of this owner. The turn lasts for the body of the `with` statement.

        Raises:
            AbandonedError: `abandoned` was set before the turn came.
        """
        if self.is_taken:
            await self._wait(owner, abandoned)
        self.is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str, abandoned: asyncio.Event) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(mine)
        leaving = asyncio.create_task(abandoned.wait())
        try:
            # A cancellation of this task does not cancel `mine`, so `_pass_on` can always set its result.
            await asyncio.wait((mine, leaving), return_when=asyncio.FIRST_COMPLETED)
            if abandoned.is_set():
                raise AbandonedError
        except BaseException:
            self._leave(owner, mine)
            raise
        finally:
            leaving.cancel()

    def _leave(self, owner: str, mine: asyncio.Future[None]) -> None:
        """Give up a turn, whether it has come or is still awaited."""
        if mine.done():
            self._pass_on()
            return
        self._waiting[owner].remove(mine)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _pass_on(self) -> None:
        self.is_taken = bool(self._waiting)
        if self.is_taken:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turns.popleft().set_result(None)
            if turns:
                self._waiting[owner] = turns


ENCODINGS = Family("encodings", "Encodings that were asked for; cached: the host had them already")
ENCODED_BYTES = Family("encoded_bytes", "Bytes of encodings that encoders have computed")
ENCODE_SECONDS = Family(
    "encode_seconds",
    "queue: time that work waited for other encodings; encode: time from the beginning of an encoder to its end, with "
    "the steps between its pieces",
)
ENCODE_WAITING = Family("encodings_waiting", "Work that waits for its turn at the encoders", "gauge")

STILL_SECONDS = 10.0
"""An encoder that has work but has not begun a piece of it for this many seconds counts as stuck.

The worker then sends no signs of life, and the gateway waits for `--stall-seconds` more.
"""

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
"""Types of inputs: pixels and features of audio."""


@dataclass(frozen=True, slots=True)
class EncodeTimes:
    """The time that one encoding took, in seconds."""

    queued: float
    computed: float


class WorkerEncoder:
    """The encoders of one worker and the queue for them. Requests are served in rotation.

    Args:
        load: returns the encoders. It is called in a thread, before the first encoding.
        launch: runs a job between the engine's steps. Each job is launched after the previous one has ended.
    """

    def __init__(self, load: Callable[[], Encoders], launch: Callable[[EncodeJob], None]) -> None:
        self._load = load
        self._launch = launch
        self._encoders: Encoders | None = None
        self._turns = FairTurns()
        self._moved = 0.0
        """Time at which the latest encoding, or piece of one, began, on time.monotonic()."""
        self._loop = asyncio.get_running_loop()
        self._computed = self._found = self._bytes = 0
        self._queue_seconds = self._encode_seconds = 0.0

    @property
    def waiting(self) -> int:
        """Number of inputs that wait for the encoders."""
        return self._turns.waiting

    @property
    def stands_still(self) -> bool:
        """Whether there is work without progress. Such work may never end, so the worker must send no signs of life.

        Loading the encoders is progress, because it may take minutes from a slow disk.
        """
        is_encoding = self._encoders is not None and self._turns.is_taken
        return is_encoding and time.monotonic() - self._moved > STILL_SECONDS

    async def load(self) -> Encoders:
        """Return the encoders, and load them if this is the first use. Raises ConfigError or ModelError."""
        if self._encoders is None:
            self._encoders = await asyncio.to_thread(self._load)
        return self._encoders

    async def compute(
        self, owner: str, media: MediaInput, write: Callable[[torch.Tensor], None], abandoned: asyncio.Event
    ) -> EncodeTimes:
        """Wait for a turn, encode an input, and give the encoding to `write`. Return the times.

        Do not cancel this call, because a thread may be writing. Set `abandoned` to end it soon, with an error.

        Args:
            owner: name of the request, for a fair order.
            write: stores an encoding [media.length, hidden]; called on the engine's compute thread.

        Raises:
            InvalidRequestError: the input cannot be encoded.
            AbandonedError: the work was abandoned.
            UnavailableError: the worker stops, or the encoder failed.
        """
        began = time.monotonic()
        async with self._turns.turn(owner, abandoned):
            if abandoned.is_set():
                raise AbandonedError
            encoders = await self.load()
            started = self._moved = time.monotonic()
            await self._run(encoders, media, write, abandoned)
        times = EncodeTimes(started - began, time.monotonic() - started)
        self._computed += 1
        self._queue_seconds += times.queued
        self._encode_seconds += times.computed
        return times

    def note_found(self) -> None:
        """Count an encoding that was found in the cache, for metrics."""
        self._found += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the numbers and times of encodings as metrics."""
        yield Sample("encodings_computed", self._computed, ENCODINGS, {"cached": "false"})
        yield Sample("encodings_cached", self._found, ENCODINGS, {"cached": "true"})
        yield Sample("encoded_bytes", self._bytes, ENCODED_BYTES)
        yield Sample("encode_queue_seconds", self._queue_seconds, ENCODE_SECONDS, {"kind": "queue"})
        yield Sample("encode_total_seconds", self._encode_seconds, ENCODE_SECONDS, {"kind": "encode"})
        yield Sample("encodings_waiting", self.waiting, ENCODE_WAITING)

    async def _run(
        self, encoders: Encoders, media: MediaInput, write: Callable[[torch.Tensor], None], abandoned: asyncio.Event
    ) -> None:
        inputs = tensor_of(media)
        if (rows := encoders.rows(media.kind, inputs.shape)) != media.length:
            raise InvalidRequestError(
                f"the encoder gives {rows} rows for an input of {media.length} tokens: gateway and workers must be of "
                "one release"
            )
        ended: asyncio.Future[None] = self._loop.create_future()

        @torch.inference_mode()
        def run(between: Between) -> None:
            def pause() -> None:
                if abandoned.is_set():  # only read here; the event loop sets it
                    raise AbandonedError
                between()
                self._moved = time.monotonic()

            rows = encoders.encode(media.kind, inputs, pause)
            write(rows)
            self._bytes += rows.nbytes

        def tell(error: Exception | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            elif isinstance(error, PacelineError):
                ended.set_exception(error)
            else:
                ended.set_exception(UnavailableError(f"the encoder failed: {type(error).__name__}: {error}"))

        def end(error: Exception | None) -> None:
            self._loop.call_soon_threadsafe(tell, error)

        self._launch(EncodeJob(run, end))
        await ended


def tensor_of(media: MediaInput) -> torch.Tensor:
    """Return the input as a tensor. Raises InvalidRequestError if its type is unknown or its size does not fit."""
    if (dtype := _DTYPES.get(media.dtype)) is None:
        raise InvalidRequestError(f"an encoder's input of type {media.dtype!r} cannot be read")
    count = torch.Size(media.shape).numel()
    if not media.shape or count == 0 or count * dtype.itemsize != len(media.data):
        raise InvalidRequestError(
            f"an encoder's input of shape {media.shape} and type {media.dtype} does not have {len(media.data)} bytes"
        )
    return torch.frombuffer(bytearray(media.data), dtype=dtype).reshape(media.shape)
