"""Digests of files cover every byte, however little of a file has changed, and large files are read once."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ModelError
from paceline.models.files import content
from paceline.models.files.content import cache_key, read_content

LARGE = (8 << 20) + 5


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of digests, which a test has for itself. Files count as settled at once."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "_SETTLED_SECONDS", -1.0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "large"
    file.write_bytes(bytes(LARGE))
    return file


@pytest.fixture
def on_first_piece(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that lets `act` run when the first piece of a file is read."""

    def arrange(act: Callable[[], object]) -> None:
        real, first = os.pread, threading.Lock()

        def pread(descriptor: int, size: int, start: int) -> bytes:
            if first.acquire(blocking=False):
                act()
            return real(descriptor, size, start)

        monkeypatch.setattr(os, "pread", pread)

    return arrange


def test_every_byte_counts_although_the_system_returns_few_at_a_time(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_content({"a": large, "b": large}).digest
    monkeypatch.setattr(content, "_REMEMBERED_BYTES", 1 << 40)  # so that it is read again
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, start: real(descriptor, min(size, 1 << 20), start))
    assert read_content({"a": large, "b": large}).digest == whole


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The places at which files are read."""
    real, places = os.pread, list[int]()

    def pread(descriptor: int, size: int, start: int) -> bytes:
        places.append(start)
        return real(descriptor, size, start)

    monkeypatch.setattr(os, "pread", pread)
    return places


def digest(path: Path) -> str:
    return read_content({"file": path}).digest


def change(path: Path, place: int) -> None:
    """Change one byte in place. The size and the time of modification stay as they are."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 1, (4 << 20) - 1, 4 << 20, 5_000_001, LARGE - 1])
def test_each_byte_counts_although_size_and_time_stay(large: Path, place: int) -> None:
    before = digest(large)
    change(large, place)
    assert digest(large) != before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(files=st.lists(st.binary(max_size=40), min_size=2, max_size=3), names=st.permutations(["a", "b", "c"]))
def test_digests_are_equal_if_names_and_bytes_are(tmp_path: Path, files: list[bytes], names: list[str]) -> None:
    def read(folder: str) -> content.FileContent:
        (tmp_path / folder).mkdir(exist_ok=True)
        paths = {name: tmp_path / folder / name for name in names[: len(files)]}
        for path, data in zip(paths.values(), files):
            path.write_bytes(data)
        return read_content(paths)

    one, same = read("one"), read("two")
    assert one == same
    assert one.digest == same.digest
    files[0] = files[0] + b"x"
    assert read("two").digest != one.digest


def test_a_large_file_is_read_once_and_again_after_a_change(large: Path, reads: list[int]) -> None:
    first = digest(large)
    assert sorted(reads) == [0, 4 << 20, 8 << 20]
    reads.clear()
    assert digest(large) == first
    assert reads == []
    change(large, 77)
    assert digest(large) != first
    assert reads


def test_a_file_that_takes_the_place_of_another_is_read(tmp_path: Path, large: Path) -> None:
    before, stat = digest(large), large.stat()
    other = tmp_path / "other"
    other.write_bytes(b"\1" * LARGE)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(large)
    assert digest(large) != before


def test_a_file_that_has_just_changed_is_not_remembered(
    large: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_SETTLED_SECONDS", 3600.0)
    digest(large)
    assert not list(memory.glob("*.json"))


@pytest.mark.parametrize("left", ["", "{}", "[1, [0], 3", '[0, [], "digest"]', "null"])
def test_what_a_power_cut_has_left_of_a_memory_is_not_believed(large: Path, memory: Path, left: str) -> None:
    before = digest(large)
    (entry,) = memory.glob("*.json")
    assert json.loads(entry.read_text())[2] == read_content({"file": large}).files[0].digest
    entry.write_text(left)
    assert digest(large) == before


def test_of_processes_that_start_together_one_reads(large: Path, reads: list[int]) -> None:
    together = threading.Barrier(3)

    def start(_: int) -> str:
        together.wait()
        return digest(large)

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(start, range(3)))) == 1
    assert len(reads) == 3


def test_without_a_place_for_digests_each_start_reads(large: Path, memory: Path, reads: list[int]) -> None:
    memory.parent.write_text("no folder")
    assert digest(large) == digest(large)
    assert len(reads) == 6


def test_a_file_that_changes_while_it_is_read_is_an_error(
    large: Path, memory: Path, on_first_piece: Callable[[Callable[[], object]], None]
) -> None:
    on_first_piece(lambda: change(large, 3))
    with pytest.raises(ModelError, match="large changed while it was read"):
        digest(large)
    assert not list(memory.glob("*.json"))


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(
    tmp_path: Path, large: Path, on_first_piece: Callable[[Callable[[], object]], None]
) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(LARGE))
    on_first_piece(lambda: other.replace(large))
    with pytest.raises(ModelError, match="large changed while it was read"):
        digest(large)


def test_a_later_change_is_noticed_and_a_touch_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    found = read_content({"file": file})
    file.chmod(0o600)
    os.utime(file)
    found.check()
    change(file, 2)
    with pytest.raises(ModelError, match="file has changed since it was read"):
        found.check()
    file.unlink()
    with pytest.raises(ModelError, match=r"cannot read .*file"):
        found.check()


def test_a_link_that_leads_elsewhere_later_changes_nothing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    found = read_content({"file": link})
    link.unlink()
    link.symlink_to(tmp_path / "two")
    found.check()
    assert read_content({"file": link}) != found


def test_keys_differ_by_all_inputs() -> None:
    keys = {cache_key("name", *inputs) for inputs in ((), ("ab", "c"), ("a", "bc"), ("ab", "c", 1), ("ab", ("c", 1)))}
    assert len(keys) == 5
    assert cache_key("name", "ab", "c") == cache_key("name", "ab", "c")
