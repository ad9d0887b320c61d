"""Processes that decode media, which may crash or hang without harm to others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray

from paceline.core import env
from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, InvalidRequestError, UnavailableError
from paceline.services.common.tasks import InUse
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.budget import MemoryBudget, RequestBudget
from paceline.services.gateway.planning.media.channel import Channel, ChannelError, Facts, array_of, facts_of, size_of
from paceline.services.gateway.planning.media.items import Fit, ImageSize

START_SECONDS = 60.0
"""Longest time for a process to start, in seconds."""
END_SECONDS = 10.0
"""Longest time for a killed process to end, in seconds, because the system has to free its memory and network."""
MAX_WAITING = 256
"""Largest number of items that wait for a process. The requests of further items get 429."""
ITEMS = 500
"""Number of items that one process decodes. Then it is replaced, because decoders may leak memory."""
GRACE_SECONDS = 0.25
"""Seconds that a process has to finish an item whose request was cancelled. Starting another process takes longer."""
_BASE_BYTES = 1 << 30
"""Address space of a process before it decodes, in bytes: mostly code of libraries."""
_BYTES_PER_PIXEL = 16
"""Memory for each pixel of the largest image while it is decoded, converted and rotated, in bytes."""

log = logging.getLogger(__name__)


class DecodeProcess:
    """One child process, which decodes one item at a time. It starts by `start`, or with the first item.

    Args:
        memory: largest size of its address space, in bytes.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._items = 0
        self.is_usable = True
        """Whether this process can decode another item."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it has started."""
        return self._process.pid if self._process is not None else None

    def decode(
        self, job: dict[str, Any], data: bytes | bytearray, seconds: float, fit: Fit | None = None
    ) -> tuple[Facts, NDArray[Any]]:
        """Have an item decoded, and wait. Return the decoder's facts about the item, and its array.

        Args:
            fit: returns the size to which an image is resized.

        Raises:
            InvalidRequestError: `fit` refuses the image.
            MediaError: the item cannot be decoded, or not within `seconds`.
            UnavailableError: the process cannot be started.
        """
        with self._lock:
            channel = self._start()
            self._items += 1
            try:
                return self._exchange(channel, job, data, seconds, fit)
            except TimeoutError:
                self.is_usable = False
                raise MediaError(f"it could not be decoded within {seconds:g} seconds; send a smaller one") from None
            except (ChannelError, OSError, KeyError, TypeError, ValueError, OverflowError) as error:
                if self.is_usable:
                    log.warning("a process that decodes media failed at an item: %s", error)
                self.is_usable = False
                raise MediaError("it cannot be decoded; the file is broken, or too large") from None

    def start(self) -> None:
        """Start the process if it does not run, and wait until it can decode. Raises UnavailableError."""
        with self._lock:
            self._start()

    def kill(self) -> None:
        """Kill the process at once. A call of `decode` in another thread fails."""
        self.is_usable = False
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kill the process, and wait up to END_SECONDS for its end."""
        self.kill()
        with self._lock:  # a call of `decode` in another thread may still be starting the process
            if self._process is not None:
                try:
                    self._process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    log.warning("a process that decodes media, %d, does not end although it was killed", self.pid)
            if self._channel is not None:
                self._channel.close()

    def _exchange(
        self, channel: Channel, job: dict[str, Any], data: bytes | bytearray, seconds: float, fit: Fit | None
    ) -> tuple[Facts, NDArray[Any]]:
        """Send an item and return its facts and array. Raises MediaError, and the errors of `fit` and the channel."""
        deadline = time.monotonic() + seconds
        channel.send({**job, "asks": fit is not None}, data, seconds)
        answer, payload = channel.receive(job["max_bytes"], deadline - time.monotonic())
        refusal: InvalidRequestError | None = None
        wanted: ImageSize | None = None
        size: tuple[int, int] | None = None
        if fit is not None and "size" in answer:
            size = size_of(answer)
            try:
                wanted = fit(*size)
            except InvalidRequestError as error:
                refusal = error
            told = {"is_refused": refusal is not None, "resize": wanted and asdict(wanted)}
            channel.send(told, seconds=deadline - time.monotonic())
            answer, payload = channel.receive(job["max_bytes"], deadline - time.monotonic())
        if answer.get("retire") or self._items == ITEMS:
            self.is_usable = False
        if refusal is not None:
            raise refusal
        if "error" in answer:
            raise MediaError(str(answer["error"]))
        array = array_of(job["kind"], answer, payload)
        if fit is not None and array.shape[:2] != ((wanted.height, wanted.width) if wanted is not None else size):
            raise ValueError("the image has another size than it said, or than it was resized to")
        return facts_of(job["kind"], answer, len(array)), array

    def _start(self) -> Channel:
        """Return the channel to the process. Start the process if it does not run."""
        if self._channel is not None and self._process is not None and self._process.poll() is None:
            return self._channel
        if self._channel is not None:
            self._channel.close()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        # -P: nothing is imported from the working directory.
        command = [sys.executable, "-P", "-m", f"{__package__}.decoder", str(theirs.fileno()), str(self._memory)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    env=env.bare_environment(OPENBLAS_NUM_THREADS="1"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
                )
            if not self.is_usable:  # `kill` was called before there was a process
                self._process.kill()
            self._channel.receive(0, START_SECONDS)
        except (ChannelError, OSError) as error:
            self.kill()
            raise UnavailableError("no process that decodes media can be started; the log says why") from error
        return self._channel


class DecodePool:
    """Decodes items in a few processes, which start when they are first needed; `start` starts one earlier.

    Args:
        memory: the memory for media, from which the budgets of requests come.
    """

    def __init__(self, config: GatewayConfig, memory: MemoryBudget) -> None:
        self.seconds = config.media_decode_seconds
        """Longest wait of an item for a process, and longest time of its decoding, in seconds."""
        self._process_memory = _BASE_BYTES + _BYTES_PER_PIXEL * config.max_image_pixels + memory.of_item
        self._idle: list[DecodeProcess] = []
        self._busy: set[DecodeProcess] = set()
        self._running = InUse()
        """Counts items from the time they get a process until their callers have the results."""
        self._threads = concurrent.futures.ThreadPoolExecutor(config.media_processes, "decode")
        self._enders = concurrent.futures.ThreadPoolExecutor(config.media_processes, "decode-end")
        self._ending: set[asyncio.Future[None]] = set()
        """Tasks that wait for the ends of processes."""
        self._slots = asyncio.Semaphore(config.media_processes)
        self._long_slots = asyncio.Semaphore(max(1, config.media_processes - 1))
        self.waiting = 0
        """Number of items that wait for a process."""
        self._is_closed = False

    @property
    def processes(self) -> list[DecodeProcess]:
        """The processes that run now."""
        return [*self._idle, *self._busy]

    async def start(self) -> None:
        """Start a process, so that the first item need not wait for it. Raises UnavailableError."""
        process = DecodeProcess(self._process_memory)
        await asyncio.get_running_loop().run_in_executor(self._threads, process.start)
        self._idle.append(process)

    async def decode(
        self,
        kind: str,
        data: bytes | bytearray,
        options: dict[str, Any],
        budget: RequestBudget,
        fit: Fit | None = None,
    ) -> tuple[Facts, NDArray[Any]]:
        """Decode an item. Return the decoder's facts about it, and its array, whose bytes `budget` has counted.

        Args:
            fit: returns the size to which an image is resized. It runs in a thread.

        Raises:
            InvalidRequestError: `fit` refuses the image.
            MediaError: the item is broken, too large, or takes too long.
            BusyError: too many items wait, or the memory for media is full.
            UnavailableError: no process can be started.
        """
        async with self._slot(kind):
            most = budget.of_next_item
            job = {"kind": kind, "options": options, "max_bytes": most, "seconds": self.seconds}
            # Count the largest array while it is decoded, so that there is room for it.
            with budget.temporary() as take, self._running.running():
                take(most)
                facts, array = await self._run(job, data, fit)
            budget.take(array.nbytes)
            return facts, array

    async def close(self) -> None:
        """Kill all processes. Items that they decode fail."""
        self._is_closed = True
        for process in self.processes:
            process.kill()
        for process in self._idle:
            self._end(process)
        self._idle.clear()
        await asyncio.to_thread(self._threads.shutdown)
        await self._running.wait_until_idle()
        if self._ending:
            await asyncio.wait(self._ending)
        self._enders.shutdown()

    @contextlib.asynccontextmanager
    async def _slot(self, kind: str) -> AsyncIterator[None]:
        """Hold a free process. Videos and audio leave one process free for images, which take less time."""
        if self.waiting >= MAX_WAITING:
            raise BusyError("too many images, videos and audio clips wait to be decoded; try again later")
        slots = [self._slots] if kind == "image" else [self._long_slots, self._slots]
        async with contextlib.AsyncExitStack() as stack:
            self.waiting += 1
            try:
                async with asyncio.timeout(self.seconds):
                    for slot in slots:
                        await stack.enter_async_context(slot)
            except TimeoutError:
                raise BusyError("other images, videos and audio clips are being decoded; try again later") from None
            finally:
                self.waiting -= 1
            yield

    async def _run(self, job: dict[str, Any], data: bytes | bytearray, fit: Fit | None) -> tuple[Facts, NDArray[Any]]:
        if self._is_closed:
            raise UnavailableError("this gateway is shutting down; try another one")
        process = self._idle.pop() if self._idle else DecodeProcess(self._process_memory)
        self._busy.add(process)
        loop = asyncio.get_running_loop()
        decoding = loop.run_in_executor(self._threads, process.decode, job, data, self.seconds, fit)
        decoding.add_done_callback(lambda done: done.exception())  # after a cancellation nobody else asks for it
        try:
            # The thread has deadlines of its own. This one also holds if it hangs outside of them.
            async with asyncio.timeout(START_SECONDS + 2 * self.seconds):
                return await asyncio.shield(decoding)
        except TimeoutError:
            process.kill()
            raise UnavailableError("a process that decodes media does not answer; try again later") from None
        except asyncio.CancelledError:
            try:
                await asyncio.wait([decoding], timeout=GRACE_SECONDS)
            finally:
                if not decoding.done():
                    process.kill()
            raise
        finally:
            del decoding  # it has the error, whose traceback has this frame: the item would stay in memory
            self._busy.discard(process)
            if process.is_usable:
                self._idle.append(process)
            else:
                self._end(process)

    def _end(self, process: DecodeProcess) -> None:
        """End a process in a thread, so that no request waits for a process that ends slowly."""
        ending = asyncio.get_running_loop().run_in_executor(self._enders, process.end)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
