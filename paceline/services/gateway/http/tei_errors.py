"""Errors in the form of Text Embeddings Inference (TEI), whose clients read the status and the field `error_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.services.gateway.http.errors import ApiError

PATHS = frozenset({"/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/info", "/decode"})
"""The paths that only TEI has."""

_BY_CODE: Mapping[str, tuple[int, str]] = {
    "context_length_exceeded": (413, "validation"),
    "array_above_max_length": (413, "validation"),
    "unsupported_task": (424, "backend"),
    "empty": (400, "empty"),
}
"""TEI's status and type for errors, by our code."""
_BY_STATUS: Mapping[int, tuple[int, str]] = {
    400: (422, "tokenizer"),
    429: (429, "overloaded"),
    500: (424, "backend"),
    503: (503, "unhealthy"),
}
"""TEI's status and type for errors with other codes, by our status. Further errors keep their status."""


def tei_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return TEI's status and JSON body for an error."""
    code = str(error.body["error"]["code"])
    status, kind = _BY_CODE.get(code) or _BY_STATUS.get(error.status) or (error.status, "validation")
    return status, {"error": str(error), "error_type": kind}
