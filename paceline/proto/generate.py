"""Generates Python from the .proto files: `python -m paceline.proto.generate`. With --check it only compares."""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
# The .proto files import each other by paths from here, as paceline/proto/….
ROOT = FOLDER.parent.parent


def generate(destination: Path) -> None:
    """Write modules and type stubs to destination/paceline/proto. Exit with the compiler's message if it fails."""
    bin_folder = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{name}={bin_folder / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    outputs = [f"--{kind}_out={destination}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    sources = sorted(str(path.relative_to(ROOT)) for path in FOLDER.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *plugins, *outputs, *sources]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(done.stderr.strip())


def stale_files() -> list[str]:
    """Return the names of generated files that are out of date or missing."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder, "paceline", "proto")
        names = {path.name for place in (fresh, FOLDER) for path in place.glob("*_pb2*.py*")}
        _, different, missing = filecmp.cmpfiles(fresh, FOLDER, names, shallow=False)
        return sorted(different + missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not up to date")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = stale_files()
    if stale:
        print(f"not up to date: {', '.join(stale)}; run make proto", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
