from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.turns import PAGE_BYTES
from paceline.services.common.shared_memory import is_mapped, map_arena, map_shared, take_huge_pages

HUGE = 2 << 20
SIZE = 2 * HUGE + 4096


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, SIZE)
    yield descriptor
    os.close(descriptor)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def mapping_at(where: int) -> dict[str, str]:
    """Return the fields of /proc/self/smaps for the mapping at this address; empty if there is no such mapping."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{where:x}-.*\n((?:\w+:.*\n)+)", text, re.MULTILINE)
    return dict(re.findall(r"^(\w+): +(.*)$", found[1], re.MULTILINE)) if found else {}


def test_maps_see_the_same_bytes_and_are_gone_with_their_last_view(descriptor: int) -> None:
    one, other = map_shared(descriptor, SIZE), map_shared(descriptor, SIZE)
    one[SIZE - 4 :] = b"last"
    assert other[SIZE - 4 :] == b"last"
    where, part = address(one), one[:4]
    one.release()
    assert mapping_at(where)
    part.release()
    assert not mapping_at(where)
    assert mapping_at(address(other))


def test_what_cannot_be_mapped_leaves_no_room_taken() -> None:
    with pytest.raises(OSError, match="cannot map"):
        map_shared(-1, SIZE)
    ranges = re.findall(r"^(\w+)-(\w+) ---p", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert SIZE + HUGE not in [int(end, 16) - int(start, 16) for start, end in ranges]


def test_a_file_of_less_than_a_page_stays_as_it_is(descriptor: int) -> None:
    assert not take_huge_pages(descriptor, HUGE - 1)
    assert os.fstat(descriptor).st_blocks == 0


def test_a_new_file_gets_huge_pages_and_every_map_of_it_has_them(descriptor: int) -> None:
    if tuple(int(part) for part in platform.release().split(".")[:2]) < (6, 1):
        pytest.skip("the system is older than MADV_COLLAPSE")
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("the system has no huge pages")
    if not take_huge_pages(descriptor, SIZE):
        pytest.skip("the system has no huge page to spare")
    view = map_shared(descriptor, SIZE)
    assert bytes(view) == bytes(SIZE)
    assert mapping_at(address(view))["ShmemPmdMapped"] == f"{2 * HUGE // 1024} kB"


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A folder on overlayfs, like the root of a container."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mounting = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    if shutil.which("mount") is None or subprocess.run(mounting, capture_output=True, timeout=30).returncode:
        pytest.skip("NOT TESTED: this user may not mount an overlay, so locks on overlayfs are untested")
    yield merged
    subprocess.run(["umount", "--lazy", str(merged)], check=True, timeout=30)


def test_a_mapped_arena_is_locked_on_overlayfs_too(overlay: Path) -> None:
    path = overlay / "paceline.arena"
    path.touch(mode=0o600)
    os.truncate(path, SIZE + PAGE_BYTES)
    descriptor = os.open(path, os.O_RDWR)
    view = map_arena(path, SIZE)
    assert is_mapped(descriptor)
    view.release()
    assert not is_mapped(descriptor)
    os.close(descriptor)


def test_a_lock_lives_as_long_as_a_mapping_on_overlayfs_too(overlay: Path) -> None:
    """If a worker can lock the file of a pool, it assumes that the pool's own worker has ended."""
    path = overlay / "paceline.pool"
    path.touch(mode=0o600)
    os.truncate(path, SIZE)
    own, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    view = map_shared(own, SIZE)
    os.close(own)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    view.release()
    fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(other)
