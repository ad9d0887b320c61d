"""Compare several ways to pull blocks from one host to another, and a plain copy in memory.

    python -m bench.transfer.transport --rounds 9 --json /tmp/transport.json
    python -m bench.transfer.transport --one-host

As root, the hosts are two network namespaces joined by a veth pair. Otherwise, or with --one-host, they are two
processes on the loopback interface. The ways take turns, and the processes of all other ways are stopped meanwhile.
NIXL is measured if it is installed, UCX if `paceline[ucx]` is. CPU time is of both sides together. "idle cores" is the
CPU time per second of a source that nobody reads from.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench.common.namespaces import ONE_HOST, Host, two_hosts
from bench.serving.load import table
from bench.transfer.transport_ways import READERS
from paceline.core.env import child_environment

IDLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one way with one block size: medians of all rounds except the first, which connects."""

    way: str
    block_kib: int
    gigabytes_per_second: float
    best_gigabytes_per_second: float
    """Speed of the best round, which other work on the machine disturbed least."""
    cpu_seconds_per_gigabyte: float
    idle_cores: float


class Pair:
    """The source and reader processes of one way. They are stopped until `go_on(True)`."""

    def __init__(self, hosts: Sequence[Host], way: str, block_bytes: int, blocks: int) -> None:
        source, reader = hosts

        def start(host: Host, role: str, *more: str) -> subprocess.Popen[str]:
            module = [sys.executable, "-m", "bench.transfer.transport_ways", role, way, str(block_bytes), str(blocks)]
            pipe, quiet = subprocess.PIPE, child_environment(NIXL_LOG_LEVEL="ERROR")
            command = [*host.command(), *module, *more]
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=quiet)

        self._source = start(source, "source")
        offer = _line(self._source)
        self._reader = start(reader, "reader", source.ip, offer)
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
        """Read all blocks once. Return wall seconds and CPU seconds of both processes.

        Raises RuntimeError if the reader has ended, as it does after it has read wrong bytes.
        """
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


@contextlib.contextmanager
def running(hosts: Sequence[Host], ways: list[str], block_bytes: int, blocks: int) -> Iterator[dict[str, Pair]]:
    pairs: dict[str, Pair] = {}
    try:
        for way in ways:
            pairs[way] = Pair(hosts, way, block_bytes, blocks)
        yield pairs
    finally:
        for pair in pairs.values():
            pair.go_on(True)
            pair.end()


def measure(hosts: Sequence[Host], ways: list[str], block_kib: int, blocks: int, rounds: int) -> list[Result]:
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
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--blocks", type=int, default=64, help="blocks in one transfer [%(default)s]")
    parser.add_argument(
        "--block-kib", type=int, nargs="+", default=[360, 1024, 2048], help="sizes of a block in KiB [%(default)s]"
    )
    parser.add_argument("--one-host", action="store_true", help="use processes on the loopback interface even as root")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    ways = [way for way, needs in READERS.items() if not needs or importlib.util.find_spec(needs)]
    apart = os.geteuid() == 0 and not options.one_host
    results: list[Result] = []
    with two_hosts() if apart else contextlib.nullcontext(ONE_HOST) as hosts:
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
