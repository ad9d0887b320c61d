"""Pulls blocks from one host to another in several ways, in turns, beside a copy in memory.

    python -m bench.transport --rounds 9 --json /tmp/transport.json
    python -m bench.transport --one-host

As root the hosts are two network namespaces joined by a veth pair; otherwise, or with --one-host, two processes on the
loopback. Only the pair whose turn it is runs; all others stand still. NIXL is measured where it is installed, UCX where
`paceline[ucx]` is. Processor time is of both sides together; idle is what a source takes while nobody reads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bench.load import table
from bench.transport_ways import READERS
from paceline.core.env import child_environment

IDLE_SECONDS = 1.0
_IP = {"source": "10.213.77.1", "reader": "10.213.77.2"}


@dataclass(frozen=True, slots=True)
class Result:
    """One way with blocks of one size; medians over all rounds but the first, which connects."""

    way: str
    block_kib: int
    gigabytes_per_second: float
    best_gigabytes_per_second: float
    """What other work on the machine left alone."""
    cpu_seconds_per_gigabyte: float
    idle_cores: float


class Hosts:
    """Two network namespaces, or none: then both hosts are this one."""

    def __init__(self, apart: bool) -> None:
        self._names = {role: f"pl{os.getpid()}{role[0]}" for role in _IP} if apart else {}

    def __enter__(self) -> Self:
        names = self._names
        for name in names.values():
            _ip("netns", "add", name)
        if names:
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                names["source"],
                "type",
                "veth",
                "peer",
                "eth0",
                "netns",
                names["reader"],
            )
        for role, name in names.items():
            _ip("-n", name, "addr", "add", f"{_IP[role]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in self._names.values():
            _ip("netns", "del", name)

    @property
    def source_ip(self) -> str:
        return _IP["source"] if self._names else "127.0.0.1"

    @property
    def reader_ip(self) -> str:
        return _IP["reader"] if self._names else "127.0.0.1"

    def command(self, role: str) -> list[str]:
        return ["ip", "netns", "exec", self._names[role]] if self._names else []


class Pair:
    """The two processes of one way."""

    def __init__(self, hosts: Hosts, way: str, block_bytes: int, blocks: int) -> None:
        def start(role: str, *more: str) -> subprocess.Popen[str]:
            module = [sys.executable, "-m", "bench.transport_ways", role, way, str(block_bytes), str(blocks)]
            pipe, quiet = subprocess.PIPE, child_environment(NIXL_LOG_LEVEL="ERROR")
            command = [*hosts.command(role), *module, *more]
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=quiet)

        self._source = start("source")
        offer = _line(self._source)
        self._reader = start("reader", hosts.source_ip, offer)
        _line(self._reader)
        self.go_on(False)

    def go_on(self, yes: bool) -> None:
        for process in (self._source, self._reader):
            process.send_signal(signal.SIGCONT if yes else signal.SIGSTOP)

    def idle_cores(self) -> float:
        began = _cpu(self._source)
        time.sleep(IDLE_SECONDS)
        return (_cpu(self._source) - began) / IDLE_SECONDS

    def read(self) -> tuple[float, float]:
        """Wall seconds, CPU seconds. Raises RuntimeError where wrong bytes came."""
        began = _cpu(self._source)
        assert self._reader.stdin is not None
        print("go", file=self._reader.stdin, flush=True)
        seconds, cpu = map(float, _line(self._reader).split())
        return seconds, cpu + _cpu(self._source) - began

    def end(self) -> None:
        for process in (self._reader, self._source):
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline().strip()):
        raise RuntimeError(f"{process.args} ended")
    return line


def _cpu(process: subprocess.Popen[str]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def running(hosts: Hosts, ways: list[str], block_bytes: int, blocks: int) -> Iterator[dict[str, Pair]]:
    pairs: dict[str, Pair] = {}
    try:
        for way in ways:
            pairs[way] = Pair(hosts, way, block_bytes, blocks)
        yield pairs
    finally:
        for pair in pairs.values():
            pair.go_on(True)
            pair.end()


def measure(hosts: Hosts, ways: list[str], block_kib: int, blocks: int, rounds: int) -> list[Result]:
    seen: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    idle: dict[str, float] = {}
    with running(hosts, ways, block_kib << 10, blocks) as pairs:
        for turn in range(rounds + 1):
            for way, pair in pairs.items():
                pair.go_on(True)
                seen[way].append(pair.read())
                if turn == 0:
                    idle[way] = pair.idle_cores()
                pair.go_on(False)
    gigabytes = (block_kib << 10) * blocks / 1e9
    return [
        Result(
            way,
            block_kib,
            gigabytes / statistics.median(seconds for seconds, _ in figures[1:]),
            gigabytes / min(seconds for seconds, _ in figures[1:]),
            statistics.median(cpu for _, cpu in figures[1:]) / gigabytes,
            idle[way],
        )
        for way, figures in seen.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[360, 1024, 2048])
    parser.add_argument("--one-host", action="store_true", help="two processes on the loopback, also as root")
    parser.add_argument("--json", type=Path, help="where all figures go")
    options = parser.parse_args()
    ways = [way for way, needs in READERS.items() if not needs or importlib.util.find_spec(needs)]
    apart = os.geteuid() == 0 and not options.one_host
    results: list[Result] = []
    with Hosts(apart) as hosts:
        for block_kib in options.block_kib:
            results += measure(hosts, ways, block_kib, options.blocks, options.rounds)
    place = "two network namespaces" if apart else "one host"
    print(f"{options.blocks} blocks, {place}, medians of {options.rounds} rounds\n")
    rows = [
        [
            one.way,
            f"{one.block_kib}",
            f"{one.gigabytes_per_second:.2f}",
            f"{one.best_gigabytes_per_second:.2f}",
            f"{one.cpu_seconds_per_gigabyte:.2f}",
            f"{one.idle_cores:.2f}",
        ]
        for one in results
    ]
    print(table(["way", "block KiB", "GB/s", "best", "CPU s/GB", "idle cores"], rows))
    if options.json:
        options.json.write_text(json.dumps({"place": place, "results": [asdict(one) for one in results]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
