"""What the gateway knows of one request beside its head and its body."""

from __future__ import annotations

import contextlib
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
from paceline.services.gateway.http.pool import FairPool

T = TypeVar("T")

_KEY = "paceline.request"
"""The entry of an ASGI scope that has the request's `RequestScope`."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestScope:
    """One request, from its head to the end of its answer.

    `RequestScopeMiddleware` makes it. All middlewares after it, and the routes, get it by `scope_of`.
    """

    id: str
    """The id in the answer and in log lines."""
    client_chose_id: bool
    """Whether the id is the client's, so that other requests may have it, too."""
    pool: FairPool
    """Threads for work on bodies."""
    bounds: Bounds
    memory: RequestMemory
    """Counts the memory of the body, and of what is read from the store for the request."""
    send: Send | None
    """The server's `send`. It takes bodies whose head has passed the middlewares, which do nothing with bodies. None
    after the end: it knows the ASGI scope, and the cycle would keep the request in memory."""
    caller: Caller = ANYONE
    """Who sent it. `Guard` says that, unless the request is a line of a batch."""
    is_background: bool = False
    """Whether nobody waits for the answer: the request is a line of a batch, and not one of a client."""
    admission: Admission = field(default_factory=Admission)
    """What the caller's key is charged."""
    arrived: float = field(default_factory=time.monotonic)
    """When the head came, on time.monotonic()."""
    waited: float = 0.0
    """Seconds of `--queue-seconds` that the request has used up because no worker was ready."""
    json_count: JsonCount = field(default_factory=JsonCount)
    """The JSON in the body, as far as the body has come."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed when the request ends, or before, when its generation runs."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers to add to the answer."""
    error_type: str = ""
    """The `type` in the answer, if it is an error."""

    @property
    def owner(self) -> str:
        """Digest of the key that let the request in; "" if the caller has none."""
        return self.caller.owner

    @property
    def request_class(self) -> str:
        """Class of the request, which depends on its caller."""
        return BACKGROUND if self.is_background else self.caller.request_class

    def unique_id(self) -> str:
        """Return an id that is unique in the cluster. Clients reuse ids, above all when they retry."""
        return f"{self.id}-{uuid.uuid4().hex[:12]}" if self.client_chose_id else self.id


def set_scope(asgi_scope: Scope, scope: RequestScope) -> None:
    """Give a request its scope, which everything that gets the ASGI scope can read from now on."""
    asgi_scope[_KEY] = scope


def scope_of(request: Mapping[str, Any]) -> RequestScope:
    """Return the scope of a request, by the framework's `Request` or by its ASGI scope."""
    scope: RequestScope = request[_KEY]
    return scope


async def aside(request: Request, work: Callable[..., T], *args: Any) -> T:
    """Run work for a request on a thread of the gateway's pool and return its result; see `FairPool.run`."""
    scope = scope_of(request)
    return await scope.pool.run(scope.owner, work, *args)
