"""Processes that decode may crash, hang or be killed, and each time only their own item is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, UnavailableError
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media import pool
from paceline.services.gateway.planning.media.budget import MemoryBudget, RequestBudget
from paceline.services.gateway.planning.media.channel import Channel, ChannelError, array_of
from paceline.services.gateway.planning.media.items import ImageSize
from paceline.services.gateway.planning.media.pool import DecodePool, DecodeProcess
from tests.services.gateway.conftest import eventually
from tests.services.gateway.planning.media.samples import audio_file, image_file, png

IMAGE = {"max_pixels": 1 << 20}
AUDIO = {"max_seconds": 10.0, "sample_rate": 16_000}
FILE = image_file()


@pytest.fixture
def budget() -> Iterator[RequestBudget]:
    with MemoryBudget(64 << 20, 2).request() as budget:
        yield budget


def pool_of(processes: int, budget: RequestBudget) -> DecodePool:
    return DecodePool(GatewayConfig(media_processes=processes, max_image_pixels=1 << 20), budget.memory)


@pytest.fixture
async def decoders(budget: RequestBudget) -> AsyncIterator[DecodePool]:
    """A pool of two processes."""
    decoders = pool_of(2, budget)
    yield decoders
    await decoders.close()
    assert not decoders.processes


async def decode(decoders: DecodePool, budget: RequestBudget, data: bytes = FILE) -> Any:
    _, array = await decoders.decode("image", data, IMAGE, budget)
    return array


async def start(decoders: DecodePool, budget: RequestBudget) -> asyncio.Task[Any]:
    """Start to decode an image, and wait until a process has it."""
    used = budget.used
    task = asyncio.create_task(decode(decoders, budget))
    await eventually(lambda: budget.used > used)
    return task


def stop(process: DecodeProcess) -> int:
    """Stop a process, so that it hangs at its next item."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    return process.pid


async def test_starts_with_the_first_item_and_is_used_again(decoders: DecodePool, budget: RequestBudget) -> None:
    assert not decoders.processes
    assert (await decode(decoders, budget)).shape == (4, 6, 3)
    (process,) = decoders.processes
    pid = process.pid
    with pytest.raises(MediaError):
        await decode(decoders, budget, b"broken")
    await decode(decoders, budget)
    assert [process.pid for process in decoders.processes] == [pid]


async def test_the_first_item_need_not_wait_for_a_process(decoders: DecodePool, budget: RequestBudget) -> None:
    await decoders.start()
    (process,) = decoders.processes
    assert process.pid is not None
    await decode(decoders, budget)
    assert [each.pid for each in decoders.processes] == [process.pid]


async def test_counts_decoded_bytes(decoders: DecodePool, budget: RequestBudget) -> None:
    await decode(decoders, budget)
    assert budget.used == 4 * 6 * 3


async def test_killed_process_is_replaced(decoders: DecodePool, budget: RequestBudget) -> None:
    await decode(decoders, budget)
    (process,) = decoders.processes
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert (await decode(decoders, budget)).shape == (4, 6, 3)


async def test_crash_costs_only_its_own_item(decoders: DecodePool, budget: RequestBudget) -> None:
    await decode(decoders, budget)
    pid = stop(decoders.processes[0])
    unlucky = await start(decoders, budget)
    other = asyncio.create_task(decode(decoders, budget))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(MediaError, match="broken, or too large"):
        await unlucky
    assert (await other).shape == (4, 6, 3)
    assert pid not in [process.pid for process in decoders.processes]
    await eventually(lambda: not psutil.pid_exists(pid))


async def test_hanging_process_is_killed(budget: RequestBudget) -> None:
    decoders = pool_of(1, budget)
    await decode(decoders, budget)
    decoders.seconds = 0.2
    pid = stop(decoders.processes[0])
    with pytest.raises(MediaError, match="within"):
        await decode(decoders, budget)
    await eventually(lambda: not psutil.pid_exists(pid))
    decoders.seconds = 20.0
    await decode(decoders, budget)
    await decoders.close()


async def test_nobody_waits_for_a_process_that_ends_slowly(
    budget: RequestBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders, slow = pool_of(1, budget), threading.Event()
    await decode(decoders, budget)
    (process,) = decoders.processes
    stop(process)
    monkeypatch.setattr(process, "end", lambda: slow.wait(10) and DecodeProcess.end(process))
    decoders.seconds = 0.2
    with pytest.raises(MediaError, match="within"):
        await decode(decoders, budget)
    decoders.seconds = 20.0
    await decode(decoders, budget)
    slow.set()
    await decoders.close()


async def test_cancelled_item_kills_its_process(decoders: DecodePool, budget: RequestBudget) -> None:
    await decode(decoders, budget)
    used, pid = budget.used, stop(decoders.processes[0])
    task = await start(decoders, budget)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert budget.used == used
    await eventually(lambda: not psutil.pid_exists(pid))
    await decode(decoders, budget)


async def test_a_cancelled_item_that_is_nearly_done_keeps_its_process(
    decoders: DecodePool, budget: RequestBudget
) -> None:
    await decode(decoders, budget)
    pid = decoders.processes[0].pid
    task = await start(decoders, budget)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await decode(decoders, budget)
    assert [process.pid for process in decoders.processes] == [pid]


async def test_item_cancelled_while_its_process_starts_leaves_none(
    decoders: DecodePool, budget: RequestBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.0)  # a process that starts quickly would be kept
    children = set(psutil.Process().children())
    task = asyncio.create_task(decode(decoders, budget))
    await eventually(lambda: bool(set(psutil.Process().children()) - children))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not set(psutil.Process().children()) - children)
    assert not decoders.processes


async def test_audio_leaves_a_process_for_images(decoders: DecodePool, budget: RequestBudget) -> None:
    clip = audio_file()
    await decoders.decode("audio", clip, AUDIO, budget)
    stop(decoders.processes[0])
    clips = [asyncio.create_task(decoders.decode("audio", clip, AUDIO, budget)) for _ in range(3)]
    await eventually(lambda: decoders.waiting == 2)
    assert (await decode(decoders, budget)).shape == (4, 6, 3)
    for task in clips:
        task.cancel()
    await asyncio.gather(*clips, return_exceptions=True)


async def test_too_many_items_are_refused(
    decoders: DecodePool, budget: RequestBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_WAITING", 0)
    with pytest.raises(BusyError, match="try again later"):
        await decode(decoders, budget)


async def test_item_that_waits_too_long_is_busy(budget: RequestBudget) -> None:
    decoders = pool_of(1, budget)
    await decode(decoders, budget)
    stop(decoders.processes[0])
    first = await start(decoders, budget)
    decoders.seconds = 0.1
    with pytest.raises(BusyError, match="are being decoded"):
        await decode(decoders, budget)
    await decoders.close()
    with pytest.raises(MediaError):
        await first
    with pytest.raises(UnavailableError, match="shutting down"):
        await decode(decoders, budget)


async def test_process_is_replaced_after_many_items(
    decoders: DecodePool, budget: RequestBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ITEMS", 2)
    await decode(decoders, budget)
    (first,) = decoders.processes
    await decode(decoders, budget)
    assert first not in decoders.processes


def test_memory_of_a_process_is_limited() -> None:
    process = DecodeProcess(600 << 20)
    job = {"kind": "image", "options": {"max_pixels": 1 << 30}, "max_bytes": 4 << 30, "seconds": 20.0}
    try:
        with pytest.raises(MediaError, match=r"too much memory|too large"):
            process.decode(job, png(30_000, 30_000, b""), 60.0)
    finally:
        process.end()


def may_leave_network() -> bool:
    """Return whether the system allows a new process what a process that decodes asks for."""
    program = "from paceline.services.gateway.planning.media.confinement import leave_network; print(leave_network())"
    return subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "True"


def test_process_has_no_secrets_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    process = DecodeProcess(2 << 30)
    try:
        process.decode({"kind": "image", "options": IMAGE, "max_bytes": 1 << 20, "seconds": 20.0}, FILE, 60.0)
        assert "PACELINE_API_KEY" not in psutil.Process(process.pid).environ()
        own, others = (os.readlink(f"/proc/{pid}/ns/net") for pid in (os.getpid(), process.pid))
        assert (own != others) == may_leave_network()
    finally:
        process.end()
    assert not psutil.pid_exists(process.pid or 0)


@pytest.mark.slow
def test_killed_gateway_leaves_no_process() -> None:
    lines = [
        "from paceline.services.gateway.planning.media.pool import DecodeProcess",
        "process = DecodeProcess(2 << 30)",
        "process._start()",
        "print(process.pid, flush=True)",
        "input()",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None
        orphan = psutil.Process(int(gateway.stdout.readline()))
        gateway.kill()
    orphan.wait(20)


class LyingProcess(DecodeProcess):
    """A process that a hostile item has taken over, with a thread in its place.

    Args:
        facts: what it tells about an image, or a video of one frame, of one pixel.
        size: the size that it tells before; None tells none.
    """

    def __init__(self, facts: object, size: object = None) -> None:
        super().__init__(1 << 30)
        self._facts = facts
        self._size = size

    def _start(self) -> Channel:
        self._channel, theirs = (Channel(end) for end in socket.socketpair())
        threading.Thread(target=self._lie, args=(theirs,)).start()
        return self._channel

    def _lie(self, channel: Channel) -> None:
        job, _ = channel.receive(1 << 20)
        shape = [1, 1, 1, 3] if job["kind"] == "video" else [1, 1, 3]
        with contextlib.suppress(ChannelError, OSError):  # it may have been found out
            if self._size is not None:
                channel.send({"size": self._size})
                channel.receive(0)
            channel.send({"facts": self._facts, "shape": shape, "dtype": "|u1"}, bytes(3))
        channel.close()


@pytest.mark.parametrize("facts", [5, {}, {"timestamps": "x"}, {"timestamps": [1, 2]}, {"timestamps": [10**400]}])
def test_facts_that_do_not_fit_are_an_error_of_the_item(facts: object) -> None:
    process = LyingProcess(facts)
    job = {"kind": "video", "options": {}, "max_bytes": 100, "seconds": 10.0}
    with pytest.raises(MediaError, match="cannot be decoded"):
        process.decode(job, b"item", 10.0)
    assert not process.is_usable
    process.end()


@pytest.mark.parametrize("shape", [[], [3], [1, 3], [1, 1, 1, 3], [3, 1, 1]])
def test_an_array_of_another_kind_is_an_error_of_the_item(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="no array of the kind image"):
        array_of("image", {"shape": shape, "dtype": "|u1"}, memoryview(bytes(3)))


@pytest.mark.parametrize("size", [None, 5, [1], [1, 0], ["1", 1], [1, 1]])
def test_a_size_that_is_none_or_another_is_an_error_of_the_item(size: object) -> None:
    process = LyingProcess({}, size)
    job = {"kind": "image", "options": {}, "max_bytes": 100, "seconds": 10.0}
    with pytest.raises(MediaError, match="cannot be decoded"):
        process.decode(job, b"item", 10.0, lambda height, width: ImageSize(9, 9, 0))
    assert not process.is_usable
    process.end()


async def test_a_thread_that_hangs_costs_its_own_item(budget: RequestBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders, go_on = pool_of(1, budget), threading.Event()
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    monkeypatch.setattr(DecodeProcess, "decode", lambda *arguments: go_on.wait(10))
    decoders.seconds = 0.1
    with pytest.raises(UnavailableError, match="does not answer"):
        await decode(decoders, budget)
    assert budget.used == 0
    go_on.set()
    await decoders.close()
