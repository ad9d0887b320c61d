"""The headers that say how a request runs: deadlines, priority, session, and the key that makes it idempotent."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import uuid

from fastapi import Request

from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import scope_of
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.planning.schemas import MAX_SESSION_CHARACTERS

_PRIORITY = "X-Vllm-Priority"
_SESSION = "X-Session-ID"
_TIMEOUT = "X-Request-Timeout"
_TTFT = "X-SLO-TTFT-MS"
IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARACTERS = 255


def timeout_of(request: Request) -> float | None:
    """Return the client's limit for a request, in seconds from arrival; None if the request has no such header.

    Raises ApiError if the header X-Request-Timeout is not valid.
    """
    return _positive(request, _TIMEOUT, "seconds")


def id_of_made(request: Request) -> str:
    """Return 32 hexadecimal digits for the id of the object that a request makes, such as a response or a batch.

    The digits are random, or a digest of the caller, the path and the header Idempotency-Key. So a client that repeats
    a request, because no answer came, gets the object that its first try made.

    Raises ApiError if the header is not valid.
    """
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return uuid.uuid4().hex
    if not re.fullmatch(rf"[!-~]{{1,{MAX_KEY_CHARACTERS}}}", key):
        message = f"{IDEMPOTENCY_KEY} must be 1 to {MAX_KEY_CHARACTERS} visible ASCII characters without spaces"
        raise ApiError(400, message, param=IDEMPOTENCY_KEY)
    # A path has no spaces, and the owner is hexadecimal.
    return hashlib.sha256(f"{scope_of(request).owner} {request.url.path} {key}".encode()).hexdigest()[:32]


def key_was_used(made: str) -> ApiError:
    """Return the error for an Idempotency-Key that an earlier request with another body had.

    Args:
        made: id of the object that the earlier request made.
    """
    message = f"{IDEMPOTENCY_KEY}: an earlier request with this key had another body and made {made}; take a new key"
    return ApiError(422, message, param=IDEMPOTENCY_KEY, code="idempotency_key_reused")


def with_headers(plan: Plan, request: Request) -> Plan:
    """Return the plan with the request's owner and class, its headers' values, and a priority that the key allows.

    As in vLLM, the header's priority replaces the body's. X-Request-Timeout is the client's limit for the request in
    seconds. X-SLO-TTFT-MS, which llm-d also reads, is its limit for the time to first token in milliseconds.

    Raises ApiError if a header is not valid.
    """
    session_id = plan.session_id or request.headers.get(_SESSION, "")
    if len(session_id) > MAX_SESSION_CHARACTERS:
        message = f"{_SESSION} must have at most {MAX_SESSION_CHARACTERS} characters"
        raise ApiError(400, message, param=_SESSION)
    scope = scope_of(request)
    ttft = _positive(request, _TTFT, "milliseconds")
    return dataclasses.replace(
        plan,
        session_id=session_id,
        priority=scope.caller.priority_for(_priority(plan, request)),
        request_class=scope.request_class,
        seconds=timeout_of(request),
        waited=scope.waited,
        ttft_seconds=None if ttft is None else ttft / 1000,
        background=scope.is_background,
        owner=scope.owner,
    )


def _priority(plan: Plan, request: Request) -> int | None:
    header = request.headers.get(_PRIORITY)
    if header is None:
        return plan.wanted_priority
    if re.fullmatch(r"-?[0-9]{1,10}", header) is None or not -(2**31) <= int(header) < 2**31:
        message = f"{_PRIORITY} must be an integer of 32 bits; lower is more urgent"
        raise ApiError(400, message, param=_PRIORITY)
    return int(header)


def _positive(request: Request, name: str, unit: str) -> float | None:
    """Return the positive number in a header; None if the request has no such header. Raises ApiError if it is wrong.

    Args:
        unit: unit of the number, for the error.
    """
    header = request.headers.get(name)
    if header is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header) is None or float(header) == 0:
        raise ApiError(400, f"{name} must be a number of {unit} above 0, such as 30", param=name)
    return float(header)
