"""The origin of a request: a process of this machine, or somebody else's web page in a user's browser."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

_FORWARDING = ("forwarded", "via", "x-real-ip")
_CONTAINER_NAMES = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")
"""Names that containers have for the machine on which they run."""


def is_forwarded(headers: Headers) -> bool:
    """Return whether a proxy says that it has forwarded a request."""
    return any(name in _FORWARDING or name.startswith("x-forwarded-") for name in headers)


def is_local(scope: Scope, headers: Headers) -> bool:
    """Return whether a process of this machine sent a request: over loopback or a Unix socket, and through no proxy.

    A proxy on this machine that adds none of the usual headers is taken for the sender.
    """
    if is_forwarded(headers):
        return False
    return _is_unix_socket(scope) or _is_over_loopback(scope)


def is_foreign_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser sends a request for a page of another origin. A followed link is no such request."""
    site = headers.get("sec-fetch-site")
    if site is None:  # an older browser, a page without TLS, or no browser
        origin = headers.get("origin")
        return origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower()
    is_link = (scope["method"], headers.get("sec-fetch-mode")) == ("GET", "navigate")
    return site not in ("same-origin", "none") and not (is_link and headers.get("sec-fetch-dest") == "document")


def is_rebound(scope: Scope, headers: Headers) -> bool:
    """Return whether a request over loopback names another host, as if a foreign name had been made to point here.

    For the browser, a page of such a name is one of our own, so it may also send the headers of a proxy. Names of this
    machine are `localhost`, its host name, also with `.local`, and what containers call it. An IP address is no name,
    so nobody can make it point elsewhere.
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
