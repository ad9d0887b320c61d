"""Reading traces: files of JSON lines, in Mooncake's format or as `--record-trace` of a gateway writes them.

The second format is the first one with more fields; see `services/gateway/telemetry/trace_recorder.py`.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.simulator.trace import LoadTrace, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces. The files themselves do not name it."""


def read_trace(path: Path) -> LoadTrace:
    """Read a trace. Its first request arrives at 0 seconds.

    Requests that got no token, because they were refused or failed, are left out, because the lengths of their answers
    are unknown.

    Raises ConfigError, which names the line that is wrong.
    """
    requests: list[TraceRequest] = []
    block_tokens = 0
    for number, entry in _entries(path):
        try:
            size = int(entry.get("block_tokens", MOONCAKE_BLOCK_TOKENS))
            if size <= 0 or size % BASE_TOKENS or block_tokens not in (0, size):
                raise ValueError(f"blocks of {size} tokens; all must have the same multiple of {BASE_TOKENS}")
            block_tokens = size
            if request := _request(entry, size):
                requests.append(request)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}, line {number} is not a request of a trace: {reason}") from None
    if not requests:
        raise ConfigError(f"{path} has no request with an answer; see docs/operations/simulating.md for traces")
    requests.sort(key=lambda request: request.arrival)
    begin = requests[0].arrival
    return LoadTrace(block_tokens, [request._replace(arrival=request.arrival - begin) for request in requests])


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, with the numbers of their lines."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise ValueError(f"line {number} is not an object")
                    yield number, entry
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a file of JSON lines: {error}") from None


def _request(entry: dict[str, Any], block_tokens: int) -> TraceRequest | None:
    """Return the request of a line; None if it got no token."""
    prompt, answer = int(entry["input_length"]), int(entry["output_length"])
    if prompt < 1:
        raise ValueError("input_length must be at least 1")
    if answer < 1:
        return None
    if not math.isfinite(entry["timestamp"]):
        raise ValueError("timestamp must be a number of milliseconds")
    # Mooncake names the last block of a prompt even if it is not full. Only full blocks can be shared.
    full = (prompt + answer if "block_tokens" in entry else prompt) // block_tokens
    names = array("Q", entry["hash_ids"][:full])
    session = entry.get("session", "")
    return TraceRequest(
        float(entry["timestamp"]) / 1000,
        prompt,
        answer,
        names,
        str(entry.get("class", "")),
        str(session or ""),
        str(entry.get("key", "")),
        int(entry.get("priority", 0)),
        _adapter(int(entry.get("adapter", 0))),
    )


def _adapter(name: int) -> int:
    if not 0 <= name < 1 << 64:
        raise ValueError("adapter must be a number of 64 bits")
    return name
