"""The scope of a request: the gateway's data about one HTTP request besides its head and its body.

Of the head, only the key that makes a request idempotent is read here.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope, Send

from paceline.core.request_classes import BACKGROUND
from paceline.services.gateway.http.access.callers import ANYONE, Caller
from paceline.services.gateway.http.access.meter import Admission
from paceline.services.gateway.http.bounds import Bounds, JsonCount, RequestMemory
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.fair_pool import FairPool

T = TypeVar("T")

_KEY = "paceline.request"
"""Name of the ASGI scope entry that holds the request's `RequestScope`."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestScope:
    """The gateway's data about one request, from its head to the end of its answer.

    `RequestScopeMiddleware` creates it. All middlewares after that one, and the routes, get it with `scope_of`.
    """

    id: str
    """Id of the request in its answer and in log lines."""
    client_chose_id: bool
    """Whether the client chose the id. Then other requests may have the same id."""
    pool: FairPool
    """Threads for work on bodies."""
    bounds: Bounds
    memory: RequestMemory
    """Counter of the memory that the body uses, and data that is read from the store for the request."""
    send: Send | None
    """The server's own `send` function. It sends bodies past the middlewares, which only change the head of an answer.
    None after the end of the request: the function refers to the ASGI scope, and the reference cycle would keep the
    request in memory."""
    caller: Caller = ANYONE
    """The sender of the request. `Guard` sets it, unless the request is a line of a batch."""
    is_background: bool = False
    """Whether it is a background request: a line of a batch, for whose answer no client waits."""
    admission: Admission = field(default_factory=Admission)
    """The charge of the caller's key for this request."""
    arrived: float = field(default_factory=time.monotonic)
    """Instant at which the head of the request arrived, on time.monotonic()."""
    waited: float = 0.0
    """Part of `--queue-seconds` that the request has spent waiting for a ready worker, in seconds."""
    json_count: JsonCount = field(default_factory=JsonCount)
    """Count of the JSON values in the part of the body that has arrived."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Resources that are released when the request ends, or already when its generation begins to run."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers to add to the answer."""
    is_tei: bool = False
    """Whether the body has TEI's form, although the path does not belong to TEI alone. Then an error has it, too."""
    error_type: str = ""
    """The `type` of the error in the answer; "" if the answer is no error."""

    @property
    def owner(self) -> str:
        """Digest of the caller's API key; "" if the caller has no key."""
        return self.caller.owner

    @property
    def request_class(self) -> str:
        """Name of the request's class, which is that of its caller."""
        return BACKGROUND if self.is_background else self.caller.request_class

    def unique_id(self) -> str:
        """Return an id that is unique in the cluster. Clients reuse ids, above all when they retry."""
        return f"{self.id}-{uuid.uuid4().hex[:12]}" if self.client_chose_id else self.id


def set_scope(asgi_scope: Scope, scope: RequestScope) -> None:
    """Store a request's scope in the ASGI scope, where `scope_of` finds it."""
    asgi_scope[_KEY] = scope


def scope_of(request: Mapping[str, Any]) -> RequestScope:
    """Return the scope of a request.

    Args:
        request: the framework's `Request`, or the ASGI scope of the request.
    """
    scope: RequestScope = request[_KEY]
    return scope


async def aside(request: Request, work: Callable[..., T], *args: Any) -> T:
    """Run `work` for a request on a thread of the gateway's pool, in the caller's turn, and return its result."""
    scope = scope_of(request)
    return await scope.pool.run(scope.owner, work, *args)


IDEMPOTENCY_KEY = "Idempotency-Key"

MAX_KEY_CHARACTERS = 255


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
