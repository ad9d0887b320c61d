"""The recorder of `--record-trace`: one line of JSON for each sequence that ends, without any text or token.

The format is Mooncake's trace format with more fields, so tools for Mooncake's traces can read the file, and so can
`paceline simulate`. A line has

    timestamp      milliseconds from 1970 to the request's arrival, so that files of several gateways can be joined;
                   lines are in order of their ends
    input_length   tokens of the prompt
    output_length  tokens of the answer
    block_tokens   tokens of a block
    hash_ids       names of the context's full blocks, those of the prompt first; equal names mean equal contexts so far
    class          class of the request
    key            name of its API key, if it has one
    priority       lower is more urgent
    session        name of the conversation, if the client gave one
    adapter        name of its adapter's content, if it has one
    outcome        how the sequence ended, such as stop, length, abort or error
    cached_tokens  tokens of the prompt that were found in the cache
    ttft_ms        milliseconds from the arrival to the first token
    ms             milliseconds from the arrival to the end

Names of blocks, sessions, keys and adapters are keyed hashes. A reader without the cluster's secret cannot guess a
prompt and check whether its hash is in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.services.common.secret import Secret
from paceline.services.gateway.sequences.sequence import SequenceRun

MOST_WAITING = 10_000
"""Largest number of lines that wait for the disk. Further lines are dropped, because no request waits for its line."""
_NAME_BYTES = 8
_CLOSE_SECONDS = 5.0

log = logging.getLogger(__name__)


class Ending(NamedTuple):
    """The data of one ended sequence, from which a line is made."""

    fields: dict[str, Any]
    links: Sequence[bytes]
    """Links of the context's full blocks. They are hashed before they are written."""
    session: str
    owner: str
    adapter: bytes
    """Digest of the adapter's content; empty for the model alone."""


class TraceRecorder:
    """Writes lines to a file, on a thread of its own. A full file is renamed to FILE.1, and a new file is begun.

    Args:
        path: the file. If it exists and is not empty, it is renamed to FILE.1.
        most_bytes: largest size of both files together, in bytes.
        secret: key of the hashes. Gateways with the same secret write the same names. If None, each start has its own.
        layouts: function that returns the layout of each host's blocks. Block names are those of the first layout.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path, most_bytes: int, secret: Secret, layouts: Callable[[], Mapping[str, str]]) -> None:
        self._path = path
        self._layouts = layouts
        self._most_bytes = most_bytes // 2
        key = secret.key("names in traces") if secret else secrets.token_bytes(32)
        self._key = hashlib.blake2b(key, person=b"paceline trace").digest()
        self._origin = time.time() - time.monotonic()
        """Seconds to add to an instant of time.monotonic() to get time since 1970. Fixed at start, even if the clock is
        set later."""
        self._waiting: queue.Queue[Ending | None] = queue.Queue(MOST_WAITING)
        self.dropped = 0
        """Number of lines that are missing in the file, because the disk was too slow or failed."""
        try:
            if path.exists() and path.stat().st_size:
                path.replace(self._older)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"--record-trace {path} cannot be written: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="trace-recorder", daemon=True)
        self._thread.start()

    @property
    def _older(self) -> Path:
        return self._path.with_name(f"{self._path.name}.1")

    def record(self, sequence: SequenceRun, arrived: float, session: str, outcome: str) -> None:
        """Queue the line of a sequence that ends now. Call this before its token times are dropped. Does not wait.

        Args:
            arrived: instant at which the request arrived, on time.monotonic().
            session: name that the client gives to the conversation; "" if it gives none.
            outcome: how the sequence ended, such as "stop" or "error".
        """
        trace, now = sequence.trace, time.monotonic()
        times = trace.token_times
        fields = {
            "timestamp": _ms(self._origin + arrived),
            "input_length": trace.prompt_tokens,
            "output_length": len(sequence.generated),
            "block_tokens": BASE_TOKENS,
            "class": sequence.plan.request_class,
            "priority": sequence.plan.priority,
            "outcome": outcome,
            "cached_tokens": trace.cached_tokens,
            "ttft_ms": _ms(times[0] - arrived) if times else None,
            "ms": _ms(now - arrived),
        }
        # The gateway has computed most links already. They must be read here, because the event loop may add to them.
        links = tuple(sequence.context.links(next(iter(self._layouts().values()), "")))
        try:
            self._waiting.put_nowait(Ending(fields, links, session, sequence.plan.owner, sequence.plan.adapter_digest))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the lines that wait, and close the file. If the disk hangs, lines are lost after a few seconds."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)
        if self.dropped:
            log.warning("%d lines are missing in %s", self.dropped, self._path)

    # ---- the thread

    def _run(self) -> None:
        is_good = True
        while (ending := self._waiting.get()) is not None:
            try:
                self._write(ending)
                is_good = True
            except OSError as error:
                self.dropped += 1
                if is_good:
                    log.warning("the trace cannot be written to %s: %s", self._path, error)
                is_good = False
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, ending: Ending) -> None:
        if self._file.closed:
            self._rotate()  # it failed the last time
        line = {**ending.fields, "hash_ids": [self._name(link) for link in ending.links]}
        if ending.session:
            line["session"] = self._name(ending.session.encode())
        if ending.owner:
            line["key"] = self._name(ending.owner.encode())
        if ending.adapter:
            line["adapter"] = self._name(ending.adapter)
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        if self._waiting.empty() or self._file.tell() > self._most_bytes:
            self._file.flush()
        if self._file.tell() > self._most_bytes:
            self._file.close()
            self._rotate()

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.replace(self._older)
        self._file = self._open()

    def _open(self) -> IO[str]:
        # Even without texts, only the owner may read who sends how much and when.
        return os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii")

    def _name(self, data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=_NAME_BYTES, key=self._key).digest())


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
