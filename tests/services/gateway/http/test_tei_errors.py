from __future__ import annotations

import pytest

from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.tei_errors import tei_error

CASES = [
    (ApiError(400, "m", code="context_length_exceeded"), 413, "validation"),
    (ApiError(400, "m", code="array_above_max_length"), 413, "validation"),
    (ApiError(413, "m"), 413, "validation"),
    (ApiError(400, "m", code="unsupported_task"), 424, "backend"),
    (ApiError(400, "m", code="empty"), 400, "empty"),
    (ApiError(400, "m", code="string_type"), 422, "tokenizer"),
    (ApiError(429, "m"), 429, "overloaded"),
    (ApiError(503, "m"), 503, "unhealthy"),
    (ApiError(401, "m"), 401, "validation"),
]


@pytest.mark.parametrize(("error", "status", "kind"), CASES)
def test_errors_have_the_status_that_clients_of_tei_know(error: ApiError, status: int, kind: str) -> None:
    assert tei_error(error) == (status, {"error": "m", "error_type": kind})
