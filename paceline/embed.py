"""`paceline embed`: the vectors of the texts of a file, from a running stack, as a NumPy file.

The vectors are kept in a folder beside the output file until all are there. A command that was ended and runs again
goes on from there, if its input and options are the same.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
import stat
import sys
import time
import urllib.error
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.client import GatewayClient
from paceline.core.errors import ConfigError, InvalidRequestError, UnavailableError
from paceline.core.private_folder import make_private_folder
from paceline.core.progress import Progress, StatusLines

REQUEST_SECONDS = 300.0
AWAY_SECONDS = 60.0
"""Seconds for which a gateway that does not answer, or has no room, is asked again."""
RETRIED = (429, 502, 503, 504)
"""Statuses after which a request is sent again."""
_PLACE = re.compile(r"\btexts\[(\d+)\]")

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What to compute, and how texts are sent."""

    model: str = ""
    """Name of the model; "" for the only one that embeds."""
    prompt_name: str = ""
    """Name of the model's prompt to put before each text; "" for its default prompt."""
    dimensions: int = 0
    """Number of elements of a vector; 0 for the model's own."""
    truncate: bool = False
    """Whether texts that are too long are cut at their ends."""
    batch_size: int = 64
    """Number of texts in one request."""
    concurrency: int = 4
    """Number of requests at the same time."""


def embed(source: Path, target: Path, gateway: GatewayClient, options: EmbedOptions) -> None:
    """Write the vectors of all texts of `source` to `target`, float32 [texts, elements], in the order of the lines.

    Raises:
        ConfigError: a file cannot be read or written, or a line has no text.
        InvalidRequestError: the server refuses a text. The message names its line.
        UnavailableError: no server answers.
    """
    lines = _read(source)
    gateway.fetch("/v1/models")  # so that a wrong URL is noticed at once; later, a gateway may be away for a while
    kept = KeptVectors(target, _digest(lines, gateway, options), len(lines))
    report = StatusLines(sys.stderr)
    progress = Progress(len(lines), report, "texts", kept.count)
    with kept:
        left = lines[kept.count :]
        if kept.count:
            report(f"going on after {kept.count} texts of an earlier run")
        try:
            for vectors in _vectors(left, gateway, options):
                kept.add(vectors)
                progress.show(kept.count)
        except (InvalidRequestError, UnavailableError) as error:
            done = f"{kept.count} of {len(lines)} texts are done; the same command goes on after them"
            raise type(error)(f"{error}; {done}" if kept.count else str(error)) from error
        kept.finish()
    report(f"{len(lines)} vectors of {kept.dim} numbers are in {target}")


def _vectors(lines: Sequence[tuple[int, str]], gateway: GatewayClient, options: EmbedOptions) -> Iterator[Vectors]:
    """Yield the vectors of lines, a request at a time, in order. Several requests are under way."""
    parts = (lines[begin : begin + options.batch_size] for begin in range(0, len(lines), options.batch_size))
    with ThreadPoolExecutor(options.concurrency) as pool:
        running: deque[Future[Vectors]] = deque()
        try:
            for part in parts:
                running.append(pool.submit(_ask, part, gateway, options))
                if len(running) >= options.concurrency:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for each in running:
                each.cancel()


def _ask(part: Sequence[tuple[int, str]], gateway: GatewayClient, options: EmbedOptions) -> Vectors:
    """Return the vectors of some lines. Raises InvalidRequestError, with the line in its message."""
    body: dict[str, Any] = {
        "texts": [text for _, text in part],
        "embedding_types": ["base64"],
        "truncate": "END" if options.truncate else "NONE",
    }
    named = {
        "model": options.model,
        "input_type": options.prompt_name,
        "output_dimension": options.dimensions,
    }
    body |= {name: value for name, value in named.items() if value}
    try:
        answer = _retried(lambda: gateway.fetch("/v2/embed", body, REQUEST_SECONDS))
    except InvalidRequestError as error:
        told = _PLACE.sub(lambda match: f"line {part[int(match[1])][0]}", str(error))
        told = told.replace("input_type:", "--prompt-name:")
        advice = "; --truncate cuts long texts" if "tokens and this model takes" in told else ""
        raise InvalidRequestError(told.replace(" (truncate_prompt_tokens: -1)", "") + advice) from error
    rows = [np.frombuffer(base64.b64decode(text), "<f4") for text in answer["embeddings"]["base64"]]
    if len(rows) != len(part):
        raise InvalidRequestError(f"the server has sent {len(rows)} vectors for {len(part)} texts")
    return np.stack(rows)


def _retried(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return an answer. While the server does not answer or has no room, it is asked again for AWAY_SECONDS."""
    deadline = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return ask()
        except (InvalidRequestError, UnavailableError) as error:
            pause = _retry_after(error)
            if pause is None or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)


def _retry_after(error: Exception) -> float | None:
    """Return the seconds after which a request that failed may be sent again; None if it should not be."""
    answer = error.__cause__
    if not isinstance(answer, urllib.error.HTTPError):
        return 1.0 if isinstance(error, UnavailableError) else None
    told = answer.headers.get("Retry-After", "")
    return None if answer.code not in RETRIED else float(told) if told.isdecimal() else 1.0


class KeptVectors:
    """The vectors so far, in a private folder beside the output file. They replace the output file in the end.

    Args:
        digest: digest of all that the vectors depend on. Vectors of an earlier run with another one are not used.
        total: number of vectors in the end.
    """

    def __init__(self, target: Path, digest: str, total: int) -> None:
        self.count = 0
        self.dim = 0
        self._target = target
        self._total = total
        self._folder = target.with_name(f".{target.name}.paceline")
        self._part = self._folder / "vectors"
        self._about = self._folder / "about.json"
        self._digest = digest
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            make_private_folder(self._folder)
            self._restore()
            self._file = self._part.open("ab")
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error}") from error

    def __enter__(self) -> KeptVectors:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, vectors: Vectors) -> None:
        """Append vectors [count, elements]. Raises InvalidRequestError if they have another length than before."""
        if not self.dim:
            self.dim = vectors.shape[1]
            self._about.write_text(json.dumps({"digest": self._digest, "dim": self.dim}))
        if vectors.shape[1] != self.dim:
            raise InvalidRequestError(f"the server's vectors have {vectors.shape[1]} numbers and had {self.dim} before")
        try:
            self._file.write(np.ascontiguousarray(vectors, "<f4").tobytes())
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"cannot write {self._target}: {error}") from error
        self.count += len(vectors)

    def finish(self) -> None:
        """Write the output file. An existing one is replaced when the new one is complete."""
        self._file.close()
        new = self._folder / "new"
        try:
            with new.open("wb") as file, self._part.open("rb") as part:
                # Only this user can read a file that did not exist.
                new.chmod(stat.S_IMODE(self._target.stat().st_mode) if self._target.exists() else 0o600)
                header = {"descr": "<f4", "fortran_order": False, "shape": (self._total, self.dim)}
                np.lib.format.write_array_header_1_0(file, header)
                while piece := part.read(1 << 22):
                    file.write(piece)
            new.replace(self._target)
        except OSError as error:
            raise ConfigError(f"cannot write {self._target}: {error}") from error
        shutil.rmtree(self._folder, ignore_errors=True)

    def _restore(self) -> None:
        """Take over the vectors of an earlier run, if it had the same input and options."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            about = json.loads(self._about.read_text())
            if about["digest"] == self._digest:
                size = 4 * int(about["dim"])
                self.count, self.dim = self._part.stat().st_size // size, int(about["dim"])
                with self._part.open("ab") as file:
                    file.truncate(self.count * size)  # without half a vector
        if not self.count:
            self.dim = 0
            self._part.unlink(missing_ok=True)


def _read(source: Path) -> list[tuple[int, str]]:
    """Return the number and the text of each line that is not blank. Raises ConfigError."""
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error}") from error
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{source} has no lines")
    return [(number, _text(number, line, source)) for number, line in lines]


def _text(number: int, line: bytes, source: Path) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{source}, line {number} is not JSON ({error}); each line is a text in quotes") from None
    if isinstance(value, dict):
        value = next((value[name] for name in ("text", "input", "content") if name in value), None)
    if not isinstance(value, str) or not value:
        raise ConfigError(f'{source}, line {number} has no text; write "a text", or {{"text": "a text"}}')
    return value


def _digest(lines: Sequence[tuple[int, str]], gateway: GatewayClient, options: EmbedOptions) -> str:
    asked = dataclasses.replace(options, batch_size=0, concurrency=0)
    digest = hashlib.sha256(repr((gateway.url, asked)).encode())
    for _, text in lines:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
