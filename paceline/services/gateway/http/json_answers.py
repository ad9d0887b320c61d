"""Answers of any size as JSON, written in pieces between which other threads run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi.responses import JSONResponse

_SLICE = 64
"""Number of entries of a long list that are written at once. Entries are tokens with their logprobs at most."""
_FEW = 128
"""Largest number of entries of a list whose entries are written in pieces themselves, such as choices."""
_DEPTH = 6
"""Number of levels that are written in pieces."""


class LargeJson(JSONResponse):
    """A JSON response for large content. The standard writer would let no other thread run until it has ended."""

    def render(self, content: Any) -> bytes:
        return "".join(_pieces(content, _DEPTH)).encode()


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield the text of a JSON value in pieces."""
    if depth and isinstance(value, dict) and value:
        mark = "{"
        for name, member in value.items():
            yield f"{mark}{_written(name)}:"
            yield from _pieces(member, depth - 1)
            mark = ","
        yield "}"
    elif depth and isinstance(value, list) and len(value) > _FEW:
        for start in range(0, len(value), _SLICE):
            yield ("," if start else "[") + _written(value[start : start + _SLICE])[1:-1]
        yield "]"
    elif depth and isinstance(value, list) and value:
        mark = "["
        for entry in value:
            yield mark
            yield from _pieces(entry, depth - 1)
            mark = ","
        yield "]"
    else:
        yield _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
