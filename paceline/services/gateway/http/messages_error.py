"""The form of errors in the Messages API."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

_FIELDS = {
    "response_format.json_schema.schema": "output_config.format.schema",
    ".function.parameters": ".input_schema",
}
"""Names of fields in chats, which messages may contain, and their names in this API."""


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error with an HTTP status."""
    for field, own in _FIELDS.items():
        message = message.replace(field, own)
    error = {"type": _TYPES.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
