"""JSON objects of adapters, which may be hostile."""

from __future__ import annotations

import json
from typing import Any

from paceline.core.errors import ModelError


def parse_object(content: bytes | bytearray, what: str) -> dict[str, Any]:
    """Return a JSON object. Raises ModelError if the text is none, or if a key is there twice.

    Args:
        what: where the text is, for the message.
    """
    try:
        value: Any = json.loads(content.decode(), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{what} must be a JSON object")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r:.80} is there twice")
        found[name] = value
    return found
