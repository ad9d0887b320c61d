"""Digests of the whole content of files, and the cache keys of results that are made from files. Imports no torch.

The digest of a large file is remembered in Paceline's cache, together with the file's device, inode, size and times. So
only the first start after a change reads the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.core import env
from paceline.core.errors import ModelError
from paceline.core.machine import available_cores
from paceline.models.files.durable import write_durably
from paceline.models.files.file_lock import file_lock

_PIECE = 4 << 20
"""Number of bytes that one thread reads and hashes at a time."""
_MOST_THREADS = 8
_REMEMBERED_BYTES = 1 << 20
"""Size in bytes from which digests are remembered. Smaller files are read at each start, which takes a millisecond."""
_SETTLED_SECONDS = 2.0
"""The digest of a file that has just changed is not remembered: a second change within one tick of the file system's
clock would leave the size and the times as they are."""
_FORM = 1
"""Version of the digests. Raise it when they are computed in another way."""

log = logging.getLogger(__name__)


class FileState(NamedTuple):
    """A file's state, which changes whenever the file is written or replaced. Finding it reads no content."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """Time of the last change of the file or its metadata, in nanoseconds. Unlike `mtime_ns`, programs cannot set
    it.
    """

    @staticmethod
    def of(found: os.stat_result) -> FileState:
        return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        """Whether the file's next change is certain to change the state."""
        return time.time_ns() - self.ctime_ns > _SETTLED_SECONDS * 1e9


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file as it was read. Two such values are equal if the files' names and contents are equal."""

    name: str
    """A name that is the same on all machines, such as the path in the model's folder."""
    digest: str
    """Digest of all bytes, in hexadecimal digits."""
    path: Path = field(compare=False)
    state: FileState = field(compare=False)


@dataclass(frozen=True, slots=True)
class FileContent:
    """The files from which a result is made, as they were read."""

    files: tuple[ReadFile, ...]

    @property
    def digest(self) -> str:
        """Digest of all names and contents, in hexadecimal digits."""
        return hashlib.sha256(repr([(file.name, file.digest) for file in self.files]).encode()).hexdigest()

    def check(self) -> None:
        """Raise ModelError if the content of a file has changed. Only files whose state has changed are read again."""
        for file in self.files:
            # Hard links and permissions change the state, too.
            if _state_of(file.path) != file.state and read_content({file.name: file.path}).files != (file,):
                raise ModelError(f"{file.path} has changed since it was read; start again to use its new content")


def read_content(files: Mapping[str, Path]) -> FileContent:
    """Return the content of files, given by their names. Large files whose digests are remembered are not read.

    Raises ModelError if a file cannot be read or changes while it is read.
    """
    memory = _Memory(env.default_cache_dir() / "digests")
    paths = {name: path.resolve() for name, path in sorted(files.items())}
    found = {name: memory.recall(path) for name, path in paths.items()}
    unknown = [path for name, path in paths.items() if found[name] is None]
    large = [path.name for path in unknown if _state_of(path).size >= _REMEMBERED_BYTES]
    with memory.lock(large), ThreadPoolExecutor(min(available_cores(), _MOST_THREADS), "digest") as threads:
        for name, path in paths.items():
            if found[name] is None:
                # Another process may have read the file while this one waited for the lock.
                found[name] = memory.recall(path) or _read(path, memory, threads)
    return FileContent(tuple(ReadFile(name, *known) for name, known in found.items() if known is not None))


def cache_key(name: str, *inputs: object) -> str:
    """Return the key of a cached result: `name` and a digest of everything that the result depends on.

    Args:
        inputs: digests, versions of code, and all other things that decide the result, each by its `repr`.
    """
    return f"{name}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"


_Known = tuple[str, Path, FileState]
"""A file's digest, path and state."""


def _read(path: Path, memory: _Memory, threads: ThreadPoolExecutor) -> _Known:
    """Read a whole file. Its digest is the SHA-256 of its size and of the SHA-256 of each piece."""
    try:
        with path.open("rb", buffering=0) as file:
            before = FileState.of(os.fstat(file.fileno()))
            is_settled = before.is_settled
            pieces = threads.map(partial(_hash_piece, file.fileno(), before.size), range(0, before.size, _PIECE))
            digest = hashlib.sha256(f"{before.size}:".encode() + b"".join(pieces)).hexdigest()
            after = FileState.of(os.fstat(file.fileno()))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if not before == after == _state_of(path):
        raise ModelError(f"{path} changed while it was read; start again when it is complete")
    if is_settled:
        memory.remember(before, digest)
    return digest, path, before


def _hash_piece(descriptor: int, size: int, start: int) -> bytes:
    digest, end = hashlib.sha256(), min(start + _PIECE, size)
    # Some file systems return fewer bytes than a call asks for. Both calls let other threads run.
    while start < end and (data := os.pread(descriptor, end - start, start)):
        digest.update(data)
        start += len(data)
    return digest.digest()


def _state_of(path: Path) -> FileState:
    try:
        return FileState.of(path.stat())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


class _Memory:
    """The digests of large files, each in a small file whose name tells the large file's device and inode."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, path: Path) -> _Known | None:
        """Return a file's remembered digest; None if the file is small, or its present state was not remembered."""
        state = _state_of(path)
        if state.size < _REMEMBERED_BYTES:
            return None
        try:
            form, known, digest = json.loads(self._entry(state).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):  # no entry, or one that a power cut has damaged
            return None
        return (str(digest), path, state) if (form, known) == (_FORM, list(state)) else None

    def remember(self, state: FileState, digest: str) -> None:
        """Remember the digest of a file, if it is large."""
        if state.size < _REMEMBERED_BYTES:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(self._entry(state), json.dumps([_FORM, state, digest]))
        except OSError as error:
            log.warning("the next start reads large files of the model again, because %s", error)

    @contextlib.contextmanager
    def lock(self, large: list[str]) -> Iterator[None]:
        """Let one process at a time read large files, so that other processes can use its digests.

        Args:
            large: names of the large files; if empty, nothing is locked.
        """
        with contextlib.ExitStack() as held:
            if large:
                log.info("reading %s whole, because it is new or has changed", ", ".join(large))
                with contextlib.suppress(OSError):  # then each process reads for itself
                    self._folder.mkdir(parents=True, exist_ok=True)
                    held.enter_context(file_lock(self._folder / ".lock", "digests of files", log.info))
            yield

    def _entry(self, state: FileState) -> Path:
        return self._folder / f"{state.device:x}-{state.inode:x}.json"
