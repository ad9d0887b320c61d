"""Limits of a process, read from a tree of files like the kernel's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.machine import available_cores, available_memory

MIB = 1 << 20
MEMINFO = f"MemTotal: {8 * 1024 * 1024} kB\nMemAvailable:    {4096 * 1024} kB\n"
CORES = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def group(limit: object, use: int, file_cache: int = 0, at: str = "") -> dict[str, object]:
    """Return the files of a control group of version 2. Sizes are in MiB."""
    half = file_cache * MIB // 2
    stat = f"anon {use * MIB}\nfile {use * MIB}\nactive_file {half}\ninactive_file {half}"
    limit = limit * MIB if isinstance(limit, int) else limit
    folder = f"sys/fs/cgroup{at}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": use * MIB, f"{folder}/memory.stat": stat}


def test_the_real_machine_tells_something() -> None:
    memory = available_memory()
    assert memory is not None
    assert memory > 16 * MIB
    assert 1 <= available_cores() <= CORES


def test_without_a_container_the_host_decides(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, {"proc/self/cgroup": "0::/user.slice"})) == 4096 * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert available_cores(tmp_path) == CORES


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        (group(1024, 300), 724),
        (group(1024, 300, file_cache=200), 924),  # the kernel drops file cache before an allocation fails
        (group(1024, 1100), 0),  # above the limit for a moment
        (group(100, 50, file_cache=90), 100),  # never more than the limit itself
        (group("max", 300), 4096),
        (group(8192, 300), 4096),  # the host has less memory than the limit
    ],
)
def test_a_container_with_a_namespace_of_its_own(tmp_path: Path, files: dict[str, object], mib: int) -> None:
    assert available_memory(write(tmp_path, {"proc/self/cgroup": "0::/", **files})) == mib * MIB


@pytest.mark.parametrize("outer", [500, 2000])
def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path, outer: int) -> None:
    files = {**group(1024, 24, at="/pods/a/worker"), **group(outer, 0, at="/pods")}
    write(tmp_path, {"proc/self/cgroup": "0::/pods/a/worker", **files})
    assert available_memory(tmp_path) == min(outer, 1000) * MIB


@pytest.mark.parametrize("path", ["/../../docker/other", "/docker/not-mounted-here"])
def test_a_path_that_cannot_be_seen_leaves_what_can(tmp_path: Path, path: str) -> None:
    write(tmp_path, {"proc/self/cgroup": f"0::{path}", **group(512, 12)})
    assert available_memory(tmp_path) == 500 * MIB


@pytest.mark.parametrize(("limit", "mib"), [(1024 * MIB, 824), (9223372036854771712, 4096)])
def test_cgroup_version_1(tmp_path: Path, limit: int, mib: int) -> None:
    folder = "sys/fs/cgroup/memory/docker/a"
    files = {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": 300 * MIB,
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {60 * MIB}\ntotal_active_file {40 * MIB}",
    }
    write(tmp_path, {"proc/self/cgroup": "12:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/", **files})
    assert available_memory(tmp_path) == mib * MIB


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", CORES), ("100000 100000", 1), ("50000 100000", 1), (f"{CORES * 200_000} 100000", CORES)],
)
def test_cores_follow_the_quota_and_are_never_none(tmp_path: Path, quota: str, cores: int) -> None:
    assert available_cores(write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})) == cores


@pytest.mark.skipif(CORES < 2, reason="one core cannot be fewer")
def test_a_part_of_a_core_is_none_and_affinity_counts(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "190000 100000"})
    assert available_cores(root) == 1
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("quota", "cores"), [(100000, 1), (-1, CORES)])
def test_cores_of_cgroup_version_1(tmp_path: Path, quota: int, cores: int) -> None:
    folder = "sys/fs/cgroup/cpu/docker/a"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": 100000}
    root = write(tmp_path, {"proc/self/cgroup": "3:cpu,cpuacct:/docker/a\n0::/", **files})
    assert available_cores(root) == cores


_PASSES_MESSAGES = """
import sys
from pathlib import Path
from paceline.core.machine import give_back_large_memory

def own_kib():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])

if sys.argv[1] == "give back":
    give_back_large_memory()
before = own_kib()
for _ in range(3):
    bytearray(b"x" * (16 << 20)).clear()
print(own_kib() - before)
"""


_USES_THREADS = """
import sys, threading
from pathlib import Path
from paceline.core.machine import give_back_large_memory

if sys.argv[1] == "give back":
    give_back_large_memory()
barrier = threading.Barrier(12)

def allocate():
    barrier.wait()
    bytearray(100_000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# Each arena but the first begins at a multiple of 64 MiB, and reserves as much.
lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if " 00:00 0" in line]
print(sum(int(line.split("-")[0], 16) % (64 << 20) == 0 for line in lines))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_threads_share_few_arenas() -> None:
    def arenas(what: str) -> int:
        """Return how many arenas twelve threads use, apart from the first one."""
        command = [sys.executable, "-c", _USES_THREADS, what]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert arenas("give back") <= 2
    assert arenas("keep") > 4


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_memory_of_large_messages_is_given_back() -> None:
    def left(what: str) -> int:
        """Return the KiB that are left."""
        command = [sys.executable, "-c", _PASSES_MESSAGES, what]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert left("give back") < 2 << 10
    assert left("keep") > 8 << 10  # otherwise the fix would have nothing to do
