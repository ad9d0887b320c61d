"""All figures of a GPU by one command.

    python -m bench.gpu --out DIR            # some ten minutes; writes one JSON a benchmark
    python -m bench.gpu --out DIR --small    # tiny shapes on any machine

Each benchmark is a process of its own, so that none finds the memory of another in use. One that fails does not keep
the others from running; the command then ends with status 1 and names it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.gpu.timing import pick_device

BENCHMARKS = ("kernels", "copies", "forward", "decode_loop")
_TIMEOUT = 3600
"""Seconds for one of them, compiling included."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on whatever device there is")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="may be repeated; all where none is named")
    options = parser.parse_args()
    pick_device(options.small)
    options.out.mkdir(parents=True, exist_ok=True)
    if failed := [name for name in options.only or BENCHMARKS if not run(name, options.out, options.small)]:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, folder: Path, small: bool) -> bool:
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", f"bench.gpu.{name}", "--out", str(folder / f"{name}.json")]
    try:
        return (
            subprocess.run([*command, *(["--small"] if small else [])], timeout=_TIMEOUT, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    main()
