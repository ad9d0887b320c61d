"""Mapped files that are read before they are used."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.models.files import read_ahead as module
from paceline.models.files.read_ahead import Lookahead, read_ahead, safetensors_places, will_read

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(5 * MIB) + b"end")
    return path


def map_file(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def mapped_bytes(path: Path) -> int:
    """Return how much of a map of this file the process can use without a page fault."""
    found = re.search(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert found
    return int(found[1]) * 1024


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_map_is_read_to_its_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", MIB)  # more pieces than threads
    mapped = map_file(file)
    assert mapped_bytes(file) == 0
    read_ahead([mapped])
    assert wait_for(lambda: mapped_bytes(file) >= len(mapped))


@pytest.mark.parametrize("memory", [6 * MIB, None])
def test_a_map_that_memory_may_not_hold_is_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, memory: int | None
) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(module, "available_memory", lambda: memory)
    monkeypatch.setattr(module, "advise", lambda *call: calls.append(call))
    read_ahead([map_file(file)])
    for thread in threading.enumerate():
        if thread.name.startswith("read-ahead"):
            thread.join()
    assert calls == []


def test_an_announcement_covers_the_tensor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(module, "advise", lambda *call: calls.append(call))
    part = map_file(file)[5:9]
    will_read(part)
    assert calls == [(part.data_ptr(), 4, mmap.MADV_WILLNEED)]


def test_any_memory_may_be_announced(file: Path) -> None:
    for tensor in (map_file(file), map_file(file)[5:9], map_file(file)[:0], torch.zeros(3)):
        before = tensor.clone()
        will_read(tensor)
        assert torch.equal(tensor, before)


def test_nothing_fails_if_no_thread_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    read_ahead([map_file(file)])


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The content of each tensor that the system is asked to read."""
    contents: list[bytes] = []

    def record(file: Path, start: int, end: int) -> None:
        contents.append(file.read_bytes()[start:end])

    monkeypatch.setattr(module, "_begin_reading", record)
    return contents


def test_tensors_within_the_window_are_announced_once(tmp_path: Path, announced: list[bytes]) -> None:
    files = [tmp_path / "1", tmp_path / "2"]
    for file, names in zip(files, ("bcd", "efg")):
        save_file({name: torch.full((10,), ord(name), dtype=torch.uint8) for name in names}, file, {"format": "pt"})
    lookahead = Lookahead(safetensors_places(files), window=35)
    lookahead.take("c")
    assert announced == [b"c" * 10, b"d" * 10, b"e" * 10]
    lookahead.take("d")
    assert announced[3:] == [b"f" * 10]
    lookahead.take("b")
    assert announced[4:] == [b"b" * 10]
    lookahead.take("g")
    assert announced[5:] == [b"g" * 10]


def test_tensors_that_are_larger_than_the_window_are_left_out(tmp_path: Path, announced: list[bytes]) -> None:
    sizes = {"a": 5, "b": 30, "c": 5}
    save_file({name: torch.full((size,), ord(name), dtype=torch.uint8) for name, size in sizes.items()}, tmp_path / "1")
    lookahead = Lookahead(safetensors_places([tmp_path / "1"]), window=20)
    for name in sizes:
        lookahead.take(name)
    assert announced == [b"aaaaa", b"ccccc"]


def bytes_in_memory(file: Path) -> int:
    """Return how much of a file the system has in memory."""
    mapped = map_file(file)
    pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(len(mapped)), pages)
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_the_system_reads_what_was_announced(tmp_path: Path) -> None:
    file = tmp_path / "1"
    save_file({"a": torch.zeros(8 * MIB), "b": torch.zeros(8 * MIB)}, file)
    with file.open("rb") as source:
        os.fsync(source.fileno())
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if bytes_in_memory(file) > MIB:
        pytest.skip("this file system keeps files in memory")
    Lookahead(safetensors_places([file])).take("a")
    assert wait_for(lambda: bytes_in_memory(file) >= 64 * MIB)
