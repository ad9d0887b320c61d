"""Start a stack several times and measure how long this takes and how much memory the stack then uses.

    python -m bench.serving.start --rounds 5 --json /tmp/start.json -- --kv-memory 512MiB
    python -m bench.serving.start --model FOLDER --first 20
    python -m bench.serving.start --model FILE.gguf --first 20 -- --quantization gguf

Arguments after -- go to `paceline serve`. Seconds are counted from the command to "Ready.", and from the command to the
first token of a request that is sent at "Ready.". Memory is read after this request: the proportional share (PSS) of
each process without shared memory, and once the shared memory of the whole stack, as the allocated size of its files.

With --first, each start packs the weights anew, and no file is in memory. Beside it stands the time to read the
checkpoint once. Both begin some seconds after the file cache was emptied: a virtual machine may give memory that nobody
uses back to its host, and then it takes long to use it again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.common.services import names_by_pid, serving
from bench.common.systems import ending_on_sigterm
from bench.serving.load import table

MIB = 1 << 20
SHARED = "shared memory"
_TIMES = (("seconds to ready", "ready_s"), ("seconds to the first token", "first_token_s"), ("CPU seconds", "cpu_s"))


@dataclass(frozen=True, slots=True)
class Start:
    """The figures of one start."""

    ready: float
    """Seconds from the command to "Ready."."""
    first_token: float
    """Seconds from the command to the first token of a request that was sent when the stack was ready."""
    cpu: float
    """CPU seconds of all processes until the first token. Other work on the machine hardly changes them."""
    memory: dict[str, float]
    """MiB by process name. The key SHARED has the shared memory."""


def measure(model: str, flags: Sequence[str]) -> Start:
    """Start a stack, send one request, and stop the stack. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with serving(Path(folder, "log"), model, *flags) as (stack, url):
            ready = time.perf_counter() - began
            _ask(url)
            first_token = time.perf_counter() - began
            parent = psutil.Process(stack.popen.pid)
            family = [parent, *parent.children(recursive=True)]
            return Start(ready, first_token, sum(map(_cpu_seconds, family)), _memory(family, names_by_pid(stack)))


def first_start(model: Path, flags: Sequence[str], idle: float) -> tuple[float, Start]:
    """Return the seconds to read a checkpoint once, and the figures of a start without packed weights.

    Args:
        model: a model's folder, or a GGUF file.
        idle: seconds between the emptying of the file cache, which needs root, and each of the two.
    """
    _empty_file_cache(idle)
    began = time.perf_counter()
    for file in [model] if model.is_file() else sorted(model.glob("*.safetensors")):
        subprocess.run(["cat", file], stdout=subprocess.DEVNULL, check=True)
    reading = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as cache:
        _empty_file_cache(idle)
        return reading, measure(str(model), ["--cache-dir", cache, *flags])


def _empty_file_cache(idle: float) -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
    time.sleep(idle)


def _ask(url: str) -> None:
    """Send a request and return at its first token. It ends before the next start, because the stack drains."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        reply.readline()


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _memory(family: Sequence[psutil.Process], names: dict[int, str]) -> dict[str, float]:
    used: dict[str, float] = {}
    arenas: set[str] = set()
    for process in family:
        with open(f"/proc/{process.pid}/smaps_rollup") as file:
            pss = {line.split()[0]: int(line.split()[1]) for line in file if line.startswith("Pss")}
        name = names.get(process.pid, process.name())
        used[name] = used.get(name, 0.0) + (pss["Pss:"] - pss["Pss_Shmem:"]) / 1024
        arenas |= {each.path for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
    used[SHARED] = sum(os.stat(path).st_blocks * 512 for path in arenas) / MIB
    return used


def summary(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the median of each figure."""
    memory = {name: statistics.median(start.memory[name] for start in starts) for name in starts[0].memory}
    return {
        "ready_s": statistics.median(start.ready for start in starts),
        "first_token_s": statistics.median(start.first_token for start in starts),
        "cpu_s": statistics.median(start.cpu for start in starts),
        "memory_mib": memory | {"all": statistics.median(sum(start.memory.values()) for start in starts)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.start", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, folder or GGUF file [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument(
        "--first",
        type=float,
        metavar="SECONDS",
        help="measure starts that pack the weights, each this long after the file cache was emptied",
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("flags", nargs="*", help="options of `paceline serve`")
    options = parser.parse_args()
    ending_on_sigterm()
    starts, readings = [], []
    for number in range(options.rounds):
        if options.first is None:
            starts.append(measure(options.model, options.flags))
        else:
            reading, start = first_start(Path(options.model), options.flags, options.first)
            starts.append(start)
            readings.append(reading)
        print(f"start {number + 1}: first token after {starts[-1].first_token:.2f} s", file=sys.stderr)
    figures = summary(starts)
    rows = [[what, f"{figures[key]:.2f}"] for what, key in _TIMES]
    if readings:
        rows.append(["seconds to read the checkpoint once", f"{statistics.median(readings):.2f}"])
    rows += [[f"MiB of {name}", f"{size:.0f}"] for name, size in figures["memory_mib"].items()]
    print(table(["figure", "median"], rows))
    if options.json:
        options.json.write_text(json.dumps({"flags": options.flags, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
