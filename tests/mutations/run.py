"""Apply mutations one by one and run the tests that must notice them.

    python -m tests.mutations.run [NAME...] [--wide]

Everything happens in a temporary copy of the tree. A mutation is *caught* if one of its tests fails; otherwise it
*survives*. With --wide a survivor is also tried on all tests without stacks. A survivor means that a test is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.catalog import ROOT, Mutation, load_mutations

TEST_SECONDS = 300.0
"""Tests that take longer have noticed the mutation, because something hangs."""
WIDE = ("tests", "-m", "not stack and not compose", "-n", "2", "--dist", "worksteal")


def copy_tree(target: Path) -> None:
    """Copy all files that git tracks or would add, and the compiled kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("paceline/kernels/native/*.so")]
    for name in names:
        if (source := ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    for link in ("services", "kernels", "models", "proto"):
        if (ROOT / link).is_symlink():
            (target / link).unlink(missing_ok=True)
            (target / link).symlink_to(os.readlink(ROOT / link))


def failing_test(tree: Path, arguments: Sequence[str]) -> str | None:
    """Run pytest in a tree until a test fails. Return the name of that test, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TEST_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stdout.splitlines()
    return next(
        (line for line in lines if line.startswith(("FAILED ", "ERROR "))), f"pytest ended with {done.returncode}"
    )


def try_out(tree: Path, mutation: Mutation, wide: bool) -> str | None:
    """Return the name of the test that noticed the mutation, or None if it survives."""
    file = tree / mutation.file
    source = file.read_text()
    file.write_text(mutation.apply(source))
    try:
        noticed = failing_test(tree, mutation.tests)
        return failing_test(tree, WIDE) if noticed is None and wide else noticed
    finally:
        file.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="mutations to try; default: all")
    parser.add_argument("--wide", action="store_true", help="try survivors on all tests without stacks")
    options = parser.parse_args()
    known = {mutation.name: mutation for mutation in load_mutations()}
    if unknown := set(options.name) - set(known):
        parser.error(f"unknown mutations: {', '.join(sorted(unknown))}")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="paceline-mutations-") as folder:
        copy_tree(Path(folder))
        for name in options.name or known:
            began = time.monotonic()
            noticed = try_out(Path(folder), known[name], options.wide)
            verdict = "SURVIVED" if noticed is None else f"caught by {noticed[:160]}"
            print(f"{name}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
            survivors += [name] if noticed is None else []
    print(f"{len(survivors)} of {len(options.name or known)} survived: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
