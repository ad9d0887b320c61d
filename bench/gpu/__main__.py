"""Run all GPU benchmarks with one command.

    python -m bench.gpu --out DIR                       # writes one JSON file per benchmark
    python -m bench.gpu --out DIR --only forward-llama-8b --timeout 540    # only a part, if the time is limited
    python -m bench.gpu --out DIR --small               # tiny shapes on any machine

Each benchmark is a process of its own, so that it does not find GPU memory in use by an earlier one. If a benchmark
fails, the others still run, and the command ends with status 1 and the names of failed benchmarks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.gpu.timing import pick_device

BENCHMARKS = {
    "copies": ["copies"],
    "handoff": ["handoff"],
    "kernels": ["kernels"],
    "forward-llama-8b": ["forward", "--model", "llama-8b"],
    "forward-gemma-3-27b": ["forward", "--model", "gemma-3-27b"],
    "decode_loop": ["decode_loop"],
    "encode": ["encode"],
    "experts": ["experts"],
}
"""Each benchmark's module in this package and its options, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on whatever device there is")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="may be repeated; default: all")
    parser.add_argument("--timeout", type=int, default=3600, help="time limit of one benchmark in seconds")
    options = parser.parse_args()
    pick_device(options.small)
    options.out.mkdir(parents=True, exist_ok=True)
    small = ["--small", "--rounds=1"] if options.small else []
    if failed := [name for name in options.only or BENCHMARKS if not run(name, options.out, small, options.timeout)]:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, folder: Path, extra: list[str], timeout: int) -> bool:
    print(f"== {name}", flush=True)
    module, *arguments = BENCHMARKS[name]
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", f"bench.gpu.{module}", *arguments, "--out", str(out), *extra]
    try:
        return subprocess.run(command, timeout=timeout, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{name} takes longer than {timeout} s", file=sys.stderr)
        return False


if __name__ == "__main__":
    main()
