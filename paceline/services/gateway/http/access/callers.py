"""The sender of a request: the caller whom the guard recognised, and the origin of the request.

The origin is a process of this machine, another machine, or a foreign web page in a user's browser. Pages of
origins that the operator names may call the API (CORS).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.core.options import listed
from paceline.core.request_classes import DEFAULT

_owner: ContextVar[str] = ContextVar("paceline_owner", default="")

_FORWARDING = ("forwarded", "via", "x-real-ip")
_CONTAINER_NAMES = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")
"""Host names by which containers reach the machine on which they run."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    name: str
    """Name of the caller's key; "" if the caller has no key."""
    owner: str
    """Hexadecimal SHA-256 of the key, which stored objects keep as their owner; "" if the caller has no key."""
    is_admin: bool
    """Whether the caller may see and end requests of other callers."""
    priority: int = 0
    """Priority of requests that state none, and the most urgent priority that the key may use; lower is more urgent."""
    request_class: str = DEFAULT
    """Name of the request class of the caller's requests."""
    share_cache: str = ""
    """Name of the group of keys with which the caller shares cached blocks; "" if it shares them with no other key."""

    def may_see(self, owner: str) -> bool:
        """Return whether the caller may see and end requests of the key with the digest `owner`."""
        return self.is_admin or self.owner == owner

    @property
    def only_owner(self) -> str | None:
        """Digest of the only key whose files and batches the caller may see; None if the caller may see all."""
        return None if self.is_admin else self.owner

    def priority_for(self, wanted: int | None) -> int:
        """Return the priority of a request. A client can make it less urgent than its key's priority, but not more.

        Args:
            wanted: priority that the request states; None if it states none.
        """
        if wanted is None:
            return self.priority
        return max(wanted, self.priority) if self.owner else wanted


ANYONE = Caller(name="", owner="", is_admin=False)
"""The caller of all requests without an API key."""


def set_current_owner(owner: str) -> None:
    """Set the caller for whom this task, and the tasks that it creates, work from now on.

    Args:
        owner: digest of the caller's key; "" if the caller has none.
    """
    _owner.set(owner)


def current_owner() -> str:
    """Return the digest of the key for whose caller this task works; "" without a key, or for the gateway itself."""
    return _owner.get()


def is_forwarded(headers: Headers) -> bool:
    """Return whether the headers of a request say that a proxy has forwarded it."""
    return any(name in _FORWARDING or name.startswith("x-forwarded-") for name in headers)


def is_local(scope: Scope, headers: Headers) -> bool:
    """Return whether a process of this machine sent a request: over loopback or a Unix socket, and through no proxy.

    A proxy on this machine that adds none of the usual headers counts as the sender.
    """
    if is_forwarded(headers):
        return False
    return _is_unix_socket(scope) or _is_over_loopback(scope)


def is_foreign_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser sends a request for a page of another origin. Following a link does not count."""
    site = headers.get("sec-fetch-site")
    if site is None:  # an older browser, a page without TLS, or no browser
        origin = headers.get("origin")
        return origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower()
    is_link = (scope["method"], headers.get("sec-fetch-mode")) == ("GET", "navigate")
    return site not in ("same-origin", "none") and not (is_link and headers.get("sec-fetch-dest") == "document")


def is_rebound(scope: Scope, headers: Headers) -> bool:
    """Return whether a request over loopback may come from DNS rebinding: its Host header names another machine.

    In that attack a foreign host name resolves to this machine. The browser then treats a page of that name as our own
    page, so the page may even send the headers of a proxy. Names of this machine are `localhost`, its host name, also
    with `.local`, and the names that containers have for it. An IP address cannot be rebound.
    """
    host = headers.get("host")
    if host is None or not _is_over_loopback(scope):
        return False  # without a Host, it is no browser
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return True
    own = socket.gethostname().lower()
    known = name in ("localhost", own, f"{own}.local", *_CONTAINER_NAMES) or name.endswith(".localhost")
    return not (known or _is_address(name))


def _is_over_loopback(scope: Scope) -> bool:
    return scope.get("client") is not None and _is_loopback(scope["client"][0])


def _is_unix_socket(scope: Scope) -> bool:
    # The address of a Unix socket is a path without a port, and its peer has none.
    return scope.get("client") is None and scope.get("server") is not None and scope["server"][1] is None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


_SHOWN = (
    "retry-after",
    "x-request-id",
    "x-schema-unenforced",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)
"""Headers of responses that a web page may read."""


def cors_options(config: GatewayConfig) -> dict[str, Any] | None:
    """Return the arguments of starlette's CORSMiddleware; None if no other origin is allowed.

    Raises ConfigError if an entry is no origin, or if pages of any origin could use keys that browsers keep.
    """
    origins = listed(config.allowed_origins)
    if not origins:
        return None
    for origin in origins:
        # Desktop applications have pages of schemes of their own, such as app://NAME.
        if origin != "*" and re.fullmatch(r'[A-Za-z][A-Za-z0-9+.-]*://[^/"\s]+', origin) is None:
            raise ConfigError(
                f"--allowed-origins: {origin!r} is no origin; write https://chat.example.com, several with commas, or *"
            )
    if config.allow_credentials and "*" in origins:
        raise ConfigError("--allow-credentials needs named origins in --allowed-origins, because * is every web page")
    return {
        "allow_origins": origins,
        "allow_methods": listed(config.allowed_methods),
        "allow_headers": listed(config.allowed_headers),
        "allow_credentials": config.allow_credentials,
        "expose_headers": _SHOWN,
    }
