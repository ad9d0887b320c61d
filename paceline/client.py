"""HTTP requests that commands send to a gateway."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import InvalidRequestError, UnavailableError

SECONDS = 5.0
"""Default deadline of each network operation, in seconds."""


def fetch(
    url: str, path: str, api_key: str, body: Mapping[str, object] | None = None, seconds: float = SECONDS
) -> dict[str, Any]:
    """Return the JSON object at `path` of the gateway at `url`.

    Args:
        body: sent with POST; without a body the request is a GET.
        seconds: deadline of each network operation of the request.

    Raises:
        InvalidRequestError: the gateway refuses. The message is the gateway's, if it gave one.
        UnavailableError: no gateway answers at `url`.
    """
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not an http URL")
        request = urllib.request.Request(f"{url.rstrip('/')}{path}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if api_key:
            request.add_header("Authorization", f"Bearer {api_key}")
        with urllib.request.urlopen(request, timeout=seconds) as response:
            answer = json.load(response)
        if not isinstance(answer, dict):
            raise ValueError("its answer is not a JSON object")
    except urllib.error.HTTPError as error:
        raise InvalidRequestError(f"{url} answers {error.code}: {_reason(error)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UnavailableError(f"no gateway at {url} ({reason}); name it with --url") from error
    return answer


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return error.reason
