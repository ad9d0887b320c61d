"""Weights that are mapped from files are given back, and come back with the same content."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.models.files import weight_maps
from paceline.models.files.weight_maps import WeightMaps

SIZE = 8 << 20


def in_memory(path: Path) -> int:
    """Return the bytes of a file that this process has in memory."""
    text, found, total = Path("/proc/self/smaps").read_text(), False, 0
    for line in text.splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            found = len(rest) == 5 and rest[4] == str(path)
        elif name == "Rss:" and found:
            total += int(rest[0]) << 10
    return total


def cached(path: Path) -> int:
    """Return the bytes of a file in the system's cache."""
    done = subprocess.run(["fincore", "-b", "-n", "-o", "RES", path], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[mmap.mmap]:
    """A file of packed weights, mapped as workers map it."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "model").mkdir()
    file = tmp_path / "packed" / "0"
    file.write_bytes(os.urandom(SIZE))
    with file.open("rb") as source:
        os.fsync(source.fileno())
        with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped[:]  # reads every page
            yield mapped


@pytest.fixture
def maps(tmp_path: Path) -> WeightMaps:
    return WeightMaps(tmp_path / "packed", tmp_path / "model")


def test_weights_leave_the_process_and_come_back(tmp_path: Path, weights: mmap.mmap, maps: WeightMaps) -> None:
    file, content = tmp_path / "packed" / "0", bytes(weights)
    assert in_memory(file) == SIZE
    assert maps.give_back(from_cache=False) == SIZE
    assert in_memory(file) == 0
    maps.take_back()
    assert in_memory(file) == SIZE
    assert bytes(weights) == content


def test_level_2_drops_them_from_the_cache(tmp_path: Path, weights: mmap.mmap, maps: WeightMaps) -> None:
    file, content = tmp_path / "packed" / "0", bytes(weights)
    maps.give_back(from_cache=False)
    if cached(file) < SIZE:
        pytest.skip("the system caches no files of this folder")
    maps.give_back(from_cache=True)
    assert cached(file) == 0
    maps.take_back()
    assert in_memory(file) == SIZE
    assert bytes(weights) == content


def test_a_map_with_a_written_page_stays(tmp_path: Path, weights: mmap.mmap, maps: WeightMaps) -> None:
    table = tmp_path / "model" / "table"
    table.write_bytes(bytes(SIZE))
    with table.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY) as copy:
        copy[0] = 7
        assert maps.give_back(from_cache=False) == SIZE  # only the other one
        assert copy[0] == 7


def test_a_map_with_a_written_page_in_the_swap_stays(
    weights: mmap.mmap, maps: WeightMaps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = f"""10000-12000 r--p 00000000 00:01 1 {tmp_path}/packed/0
Anonymous:             0 kB
Swap:                  4 kB
20000-22000 r--p 00000000 00:01 2 {tmp_path}/packed/1
Anonymous:             0 kB
Swap:                  0 kB
"""
    (tmp_path / "smaps").write_text(listed)

    def open_list(path: str, **options: Any) -> IO[str]:
        return (tmp_path / "smaps" if path == "/proc/self/smaps" else Path(path)).open(**options)

    monkeypatch.setattr(weight_maps, "open", open_list, raising=False)
    assert [each.file for each in maps._maps()] == [f"{tmp_path}/packed/1"]


def test_weights_that_cannot_be_read_back_are_an_error(tmp_path: Path, weights: mmap.mmap, maps: WeightMaps) -> None:
    maps.give_back(from_cache=False)
    os.truncate(tmp_path / "packed" / "0", 0)
    with pytest.raises(ModelError, match=r"packed/0 cannot be read back into memory \(.+\)"):
        maps.take_back()


def test_weights_of_the_workers_own_are_refused(tmp_path: Path, maps: WeightMaps) -> None:
    table = tmp_path / "table"
    table.write_bytes(bytes(SIZE))
    with table.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[0] == 0
        with pytest.raises(InvalidRequestError, match="memory of its own"):
            WeightMaps(tmp_path / "packed", tmp_path / "model").check()
