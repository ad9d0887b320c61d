"""The memory and cores that this process may use, by the limits of its machine and its container."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Controller = Literal["memory", "cpu"]

# Files with the limit and the use of memory, and the statistics of file cache: names of cgroup v2, then of v1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)

_NICENESS = 10
"""Nice value of a thread that yields to others. Each other thread then gets nine times the CPU time of this one."""
_LARGE_BYTES = 4 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Constants of glibc's malloc.h."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can allocate without swapping; None if the system does not say.

    The result is the least of two kinds of numbers: the host's available memory, and the room left in each control
    group around this process.

    Args:
        root: folder that contains /proc and /sys.
    """
    rooms = [_host_memory(root), *map(_room_in_group, _groups(root, "memory"))]
    return min((room for room in rooms if room is not None), default=None)


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may keep busy, at least 1.

    It is limited by the process's CPU affinity and by the CPU quotas of its control groups. A fraction of a core in a
    quota does not count: the threads of a step wait for each other, so all would wait for the thread on that core.

    Args:
        root: folder that contains /proc and /sys.
    """
    # Not every system has affinities.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cores_in_group(group)) is not None]
    return max(1, int(min([allowed, *quotas])))


def give_back_large_memory() -> None:
    """Make glibc return the memory of large messages and files to the system. Without glibc, do nothing.

    By default, each large allocation that is freed raises the amount that glibc keeps in every thread's arena for good.
    Two arenas are enough for threads that mostly wait. Free memory between small allocations stays in each arena.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, 2)


def trim_heap() -> None:
    """Give the free memory of this process's heap back to the system. Without glibc, do nothing."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def raise_file_limit() -> None:
    """Let this process open as many files and connections as the system allows it, rather than 1,024 by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems name a limit that they do not allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def yield_to_others() -> None:
    """Lower the priority of this thread. On Linux, each thread has its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(niceness, 19))


def name_thread() -> None:
    """Tell the system this thread's name, which tools for CPU time show. Python does this itself from 3.14 on.

    Threads that native code starts from this thread inherit the name.
    """
    with contextlib.suppress(OSError):
        name = threading.current_thread().name
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:15])


def _host_memory(root: Path) -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _groups(root: Path, controller: Controller) -> Iterator[Path]:
    """Yield the folders of the control groups around this process, from its own to the outermost visible one."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree, version 1 one for each controller.
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # A path with ".." leads out of the container. Then the container's own group is the visible top.
        innermost = top if ".." in path.split("/") else top / path.strip("/")
        yield from (folder for folder in (innermost, *innermost.parents) if folder.is_relative_to(top))


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
    """Return the number in a file; None if the file does not exist or contains "max"."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""


def process_seconds() -> float:
    """Return the age of this process, in seconds. It includes the programs that the process ran before `exec`."""
    try:
        with open("/proc/self/stat") as stat:
            started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return time.process_time()
