"""The middleware that lets a request in or refuses it, before its body is read."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import logging
from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.services.gateway.http.access.callers import (
    ANYONE,
    Caller,
    is_foreign_page,
    is_forwarded,
    is_local,
    is_rebound,
    set_current_owner,
)
from paceline.services.gateway.http.access.keys import AccessBook, caller_with
from paceline.services.gateway.http.access.limiter import Limiter
from paceline.services.gateway.http.error_responses import logged_response
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.paths import Access, decision_for, why_missing
from paceline.services.gateway.http.request_scope import scope_of

log = logging.getLogger(__name__)

_ENDS = ("/cancel", "/abort_requests")
"""Suffixes of paths of requests that end other requests."""


class Guard:
    """Middleware that applies DECISIONS and the limits of keys.

    It sets `caller`, the sender of the request, and `admission`, the charge of its key, in the request's scope. A line
    of a batch already has its caller, and is let in.

    Args:
        origins: origins whose web pages may call the API (`--allowed-origins`).
        is_exposed: whether the gateway listens at an address that other machines can reach.
    """

    def __init__(
        self, app: ASGIApp, book: AccessBook, limiter: Limiter, origins: Sequence[str] = (), is_exposed: bool = False
    ) -> None:
        self._app = app
        self._book = book
        self._limiter = limiter
        self._origins = frozenset(origin.lower() for origin in origins)
        self._is_exposed = is_exposed
        self._has_proxy = False
        """Whether a proxy has ever forwarded a request that was let in."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, answer = scope_of(scope), send
        try:
            if not request.is_background:
                request.caller = self._admit(scope)
            set_current_owner(request.owner)
            answer = self._with_limits(send, request.owner)
            if _is_counted(scope):
                request.admission = self._limiter.begin(request.owner, is_line=request.is_background)
            elif _is_read(scope):
                self._limiter.read(request.owner)
        except ApiError as refusal:
            await logged_response(refusal)(scope, receive, answer)
            return
        with request.admission:
            await self._app(scope, receive, answer)

    def _with_limits(self, send: Send, owner: str) -> Send:
        """Return a `send` function that adds headers about the limits of the caller's key, if the key has limits."""
        if not self._limiter.headers(owner):
            return send

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._limiter.headers(owner))
            await send(message)

        return send_with_limits

    def _admit(self, scope: Scope) -> Caller:
        """Return the caller of a request. Raises ApiError if the caller may not use this route."""
        path = path_of(scope)
        access = decision_for(path)
        headers = Headers(scope=scope)
        if access is Access.OPEN:
            return ANYONE
        caller, is_from_browser = self._caller(headers)
        if (access is Access.ADMIN or is_from_browser) and is_foreign_page(scope, headers):
            raise ApiError(403, "a page of another site may not call this path; open the gateway's own address")
        if self._book.has_clients and not caller.owner:
            raise self._no_key(access)
        if access is not Access.ADMIN and not caller.owner:
            self._check_page(scope, headers)
        is_admin = caller.is_admin
        if self._trusts_processes and is_local(scope, headers) and not is_rebound(scope, headers):
            is_admin = not is_foreign_page(scope, headers)
        caller = dataclasses.replace(caller, is_admin=is_admin)
        if access is Access.ADMIN and not is_admin:
            raise self._no_admin(scope, headers, caller)
        if access is None:
            raise ApiError(404, f"no such path: {scope['method']} {path}{why_missing(path)}")
        self._note_proxy(headers)
        return caller

    def _check_page(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError if a browser sends a request without a key for a page whose origin is not allowed."""
        host, origin = headers.get("host", ""), headers.get("origin", "").lower()
        if "*" in self._origins:
            return
        if is_foreign_page(scope, headers) and origin not in self._origins:
            raise ApiError(
                403,
                f"a page of another site may not call this path without a key: send one, or start the gateway with "
                f"--allowed-origins {'ORIGIN' if origin in ('', 'null') else origin}",
            )
        names = {allowed.partition("://")[2] for allowed in self._origins}
        if is_rebound(scope, headers) and host.lower() not in names:
            raise ApiError(
                403,
                f"{host!r} in Host may be a trick of a web page: open the gateway as localhost or 127.0.0.1, send a "
                f"key, or start the gateway with --allowed-origins http://{host}",
            )

    @property
    def _trusts_processes(self) -> bool:
        """Whether processes of this machine are admins.

        They are not if clients need keys and other machines can reach the gateway: a process of this machine may then
        be a proxy that forwards a client's request.
        """
        return not self._book.has_admins and not self._has_proxy and not (self._book.has_clients and self._is_exposed)

    def _note_proxy(self, headers: Headers) -> None:
        """Note whether an accepted request came through a proxy, whose clients may look like processes of this machine.

        A refused request does not count, because a web page may have added the headers of a proxy.
        """
        if not self._has_proxy and is_forwarded(headers):
            self._has_proxy = True
            if not self._book.has_admins:
                log.warning(
                    "requests come through a proxy, whose clients may pass for processes of this machine. So nobody is "
                    "an admin from now on; set PACELINE_ADMIN_KEY to scale the fleet or to open the console"
                )

    def _caller(self, headers: Headers) -> tuple[Caller, bool]:
        """Return the caller whose key is in these headers, and whether a browser may have added the key by itself."""
        basic = _basic_password(headers)
        key = self._book.find([*_sent_keys(headers), basic])
        return (ANYONE if key is None else caller_with(key)), bool(basic)

    def _no_admin(self, scope: Scope, headers: Headers, caller: Caller) -> ApiError:
        if self._book.has_admins:
            if not caller.owner:
                return self._no_key(Access.ADMIN)
            message = f"the key {caller.name!r} is a client's and this path is for admins: send an admin key"
        elif not self._trusts_processes:
            message = (
                "this path is for admins, and the gateway has no admin key. Others reach it, too, so processes of this "
                "machine are not trusted: start it with PACELINE_ADMIN_KEY or --api-keys-file, and send that key"
            )
        elif is_local(scope, headers):
            message = "open the gateway as localhost or 127.0.0.1: other names in Host may be a trick of a web page"
        else:
            message = (
                "this path is for admins, and without an admin key only for processes of this machine: start the "
                "gateway with PACELINE_ADMIN_KEY or --api-keys-file, and send that key"
            )
        return ApiError(403, message, code="admin_only")

    def _no_key(self, access: Access | None) -> ApiError:
        kind = "admin" if access is Access.ADMIN and self._book.has_admins else "API"
        message = f"a valid {kind} key is needed: send the header Authorization: Bearer KEY, or x-api-key: KEY"
        error = ApiError(401, message, code="invalid_api_key")
        # With this header a browser asks its user for the key, which it then sends as a password.
        error.headers["WWW-Authenticate"] = 'Basic realm="Paceline"' if access is Access.ADMIN else "Bearer"
        return error


def warn_without_admins(book: AccessBook, is_exposed: bool) -> None:
    """Log which callers are admins if clients need keys and there is no admin key.

    Args:
        is_exposed: whether the gateway listens at an address that other machines can reach.
    """
    if book.has_clients and not book.has_admins:
        who = "nobody" if is_exposed else "every client that runs on this machine"
        log.warning("there is no admin key, so %s is an admin; set PACELINE_ADMIN_KEY, or a key with role = admin", who)


def path_of(scope: Scope) -> str:
    """Return the path of a request without the root path, as in the paths of routes."""
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


def _is_counted(scope: Scope) -> bool:
    """Return whether a request counts against its key's limit of requests.

    All requests with a body count, because reading the body and answering it costs the gateway time, even if no worker
    computes. Requests that end other requests do not count, so that they are never refused.
    """
    path = path_of(scope)
    return scope["method"] == "POST" and decision_for(path) is Access.CLIENT and not path.endswith(_ENDS)


def _is_read(scope: Scope) -> bool:
    """Return whether a request counts against its key's limit of requests without a body.

    Such a request may read or delete much, such as a page of 10,000 files.
    """
    return scope["method"] != "POST" and decision_for(path_of(scope)) is Access.CLIENT


def _sent_keys(headers: Headers) -> Iterator[str]:
    # Anthropic's clients send their key in a header of its own.
    yield headers.get("x-api-key", "").strip()
    scheme, _, key = headers.get("authorization", "").partition(" ")
    yield key.strip() if scheme.lower() == "bearer" else ""


def _basic_password(headers: Headers) -> str:
    """Return the password of HTTP basic authentication, whatever the user name is; "" if there is none."""
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        pair = base64.b64decode(encoded.strip(), validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return ""
    return pair.partition(":")[2]
