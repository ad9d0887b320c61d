"""What this process may use: of its machine, and of the container that it runs in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Controller = Literal["memory", "cpu"]

# Limit, use, and what of the use is file cache: names of cgroup v2, then of v1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)

_LARGE_BYTES = 4 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can take without swapping; None where the system does not tell.

    The least of what the host has and what every control group around this process still allows.

    Args:
        root: where /proc and /sys are.
    """
    rooms = [_host_memory(root), *map(_room_in_group, _groups(root, "memory"))]
    return min((room for room in rooms if room is not None), default=None)


def available_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy, by its affinity and the CPU quota of its control groups; at least 1.

    Half a core of a quota is left alone: threads that wait for each other would all wait for the one without time.

    Args:
        root: where /proc and /sys are.
    """
    # Not every system has affinities.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cores_in_group(group)) is not None]
    return max(1, int(min([allowed, *quotas])))


def give_back_large_memory() -> None:
    """Has glibc return what large messages took. Unless told, it learns from each that is freed to keep as much in
    every thread's arena, for good; elsewhere nothing is done."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)


def name_thread() -> None:
    """Shows the system this thread's name, as Python does from 3.14 on: tools that count CPU time tell threads by it.

    Threads that native code starts from here inherit it.
    """
    with contextlib.suppress(OSError):
        name = threading.current_thread().name
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:15])


def _host_memory(root: Path) -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _groups(root: Path, controller: Controller) -> Iterator[Path]:
    """Folders of the control groups that hold this process, from its own to the outermost that can be seen."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree, version 1 one for each controller.
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # A path with ".." leads out of the container; what can be seen of it is its top.
        own = top if ".." in path.split("/") else top / path.strip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _room_in_group(group: Path) -> int | None:
    for limit_file, use_file, cache_names in _MEMORY_FILES:
        limit, use = _number(group / limit_file), _number(group / use_file)
        if limit is not None and use is not None:
            # The kernel drops file cache before it refuses memory. Shared memory is not counted under these names.
            cache = [line.split() for line in _read(group / "memory.stat").splitlines()]
            reclaimable = sum(int(words[1]) for words in cache if words[0] in cache_names)
            return max(0, min(limit, limit - use + reclaimable))
    return None


def _cores_in_group(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()
    if not words:
        words = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = (int(word) if word.isdigit() else 0 for word in words)
    # "max" and -1 stand for no limit.
    return quota / period if quota and period else None


def _number(file: Path) -> int | None:
    """None for a file that is not there, or that holds "max"."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""
