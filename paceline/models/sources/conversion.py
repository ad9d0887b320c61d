"""Folders that are made once and kept in Paceline's cache, and the child processes that make them. Imports no torch."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.core.env import child_environment
from paceline.core.errors import ModelError
from paceline.models.files.cache import SCRATCH, mark_used
from paceline.models.files.durable import rename_durably
from paceline.models.files.file_lock import file_lock
from paceline.models.folder import check_folder

Report = Callable[[str], None]
"""A function that is called with a sentence about each slow operation, for the user."""

_CONVERT_SECONDS = 1800.0


def make_once(
    key: str,
    name: str,
    cache_dir: Path,
    report: Report,
    make: Callable[[Path], None],
    is_complete: Callable[[Path], bool],
) -> Path:
    """Return the folder `cache_dir/key/name`. Make the folder first if it is missing. It appears whole or not at all,
    even if the power fails.

    Args:
        key: name of the result, from `cache_key`.
        name: the model's name, which clients may see.
        make: called with an empty folder; writes the folder `model` into it.
        is_complete: returns whether a folder can be used as it is.

    Raises:
        ModelError: the folder cannot be made or saved.
    """
    target = cache_dir / key / name
    if not is_complete(target):
        _make(target, report, make, is_complete)
    with contextlib.suppress(OSError):  # it is used, and if another process has just removed it, reading it says so
        mark_used(target)
    return target


def _make(target: Path, report: Report, make: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> None:
    key, name, cache_dir = target.parent.name, target.name, target.parent.parent
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with file_lock(cache_dir / f".{key}.lock", name, report), _scratch(cache_dir, key) as scratch:
            if is_complete(target):
                return
            make(scratch)
            check_folder(scratch / "model")
            if target.exists():
                shutil.rmtree(target)
            target.parent.mkdir(exist_ok=True)
            rename_durably(scratch / "model", target)
            report(f"saved {name} in {target}")
    except OSError as error:
        raise ModelError(
            f"cannot save {name} in {cache_dir}: {error.strerror or error}; free some space there, for example with "
            f"`paceline cache prune --all`, or choose another cache folder with PACELINE_CACHE"
        ) from error


def require_modules(names: Sequence[str], what: str, install: str) -> None:
    """Raise ModelError if one of these modules is not installed.

    Args:
        what: the operation that needs the modules, for the message.
        install: the arguments of `pip install` that install the modules.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"{what} needs {', '.join(missing)}; run: pip install {install}")


def run_converter(module: str, source: str, scratch: Path, name: str, report: Report, *more: str) -> None:
    """Run `python -m module source model *more` in `scratch`, which is a folder.

    The child runs in `scratch`, so it imports nothing from the user's folder by mistake. If its parent was killed, the
    next start removes `scratch`, and the child can write no more.

    Args:
        name: the converted file, for people.
        report: called with the child's lines that begin with "\\r", which tell its progress.

    Raises:
        ModelError: the converter failed; its reason is the last other line of its output.
    """
    is_late = threading.Event()
    # A pipe for errors, which nobody reads meanwhile, could fill up. If the disk is full, this file is elsewhere.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, source, "model", *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"),
            cwd=scratch,
        )

        def stop() -> None:
            is_late.set()
            process.kill()

        deadline = threading.Timer(_CONVERT_SECONDS, stop)
        deadline.start()
        try:
            said = _relay(process, report)
        finally:
            deadline.cancel()
            process.kill()
            process.wait()
        if process.returncode == 0:
            return
        if is_late.is_set():
            raise ModelError(f"converting {name} took more than {_CONVERT_SECONDS:.0f} s and was stopped")
        errors.seek(0)
        lines = [said] if said else errors.read().decode(errors="replace").strip().split("\n")
    raise ModelError(lines[-1] or f"{name}: the converter ended with status {process.returncode}")


def _relay(process: subprocess.Popen[bytes], report: Report) -> str:
    """Report the progress of a converter until it ends, and return the last line that it says besides."""
    assert process.stdout is not None
    said = ""
    with process.stdout as output:
        for raw in output:
            line = raw.decode(errors="replace").rstrip("\n")
            if line.startswith("\r"):
                report(line)
            else:
                said = line.strip() or said
    process.wait()
    return said


@contextmanager
def _scratch(cache_dir: Path, key: str) -> Iterator[Path]:
    """Make an empty folder beside the target. Call it under the lock: it first removes folders of killed processes."""
    for left in cache_dir.glob(f".{glob.escape(key)}{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f".{key}{SCRATCH}", dir=cache_dir))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
