"""Decides from which URLs and addresses media may be fetched.

Clients choose the URLs that the gateway fetches. Without a guard they could read from servers that only the gateway can
reach, such as a cloud's metadata service (server-side request forgery). The guard allows addresses and not names,
because the owner of a name may let it point to any address, and to another one a moment later.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, urlsplit

from paceline.services.gateway.http.errors import MediaError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_SCHEME_PORTS = {"http": 80, "https": 443}
_PUBLIC_PORTS = (80, 443, 8080, 8443)
_MAX_URL_CHARACTERS = 8192
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_FORBIDDEN_CHARACTER = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Matches a control character, or half of a pair of surrogates, which JSON can spell but UTF-8 cannot."""
_URL_PUNCTUATION = "%/:=&?~+!$,;'@()*[]"
"""Characters that a path or query keeps; all others that are not letters, digits, or one of -._~ are quoted."""


def _networks(*texts: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


_PRIVATE = _networks(
    "10.0.0.0/8",
    "100.64.0.0/10",  # behind a provider's address translation
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "::1/128",
    "fc00::/7",
)
"""Networks that are refused unless --allow-private-media is set."""
_NEVER = _networks(
    "0.0.0.0/8",
    "168.63.129.16/32",  # Azure's metadata, at a public address
    "100.100.100.200/32",  # Alibaba's metadata
    "169.254.0.0/16",  # link-local, with the metadata of most clouds
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",  # multicast, reserved, broadcast
    "2001::/23",  # Teredo and other protocols
    "2001:db8::/32",
    "2002::/16",  # 6to4
    "3fff::/20",
    "fd00:ec2::254/128",  # AWS's metadata
    "fd20:ce::254/128",  # Google's metadata
)
"""Networks that are always refused: special ones of IANA's registries, and metadata services of clouds."""
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
"""The public addresses of IPv6. All that contain an IPv4 address (mapped, compatible, NAT64) lie outside."""


@dataclass(frozen=True, slots=True)
class Target:
    """A checked http or https URL, in its parts."""

    scheme: str
    host: str
    """Name of the server, or its IP address without brackets."""
    port: int
    path: str
    """The path and the query, quoted."""

    @property
    def authority(self) -> str:
        """The value of the header Host in a request for this URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _SCHEME_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class MediaGuard:
    """Allows or refuses URLs and addresses.

    Args:
        domains: allowed servers, separated by commas; ".NAME" allows all names below NAME. "" allows every server.
        allow_private: whether addresses of private networks and all ports are allowed.
    """

    def __init__(self, domains: str = "", allow_private: bool = False) -> None:
        self._domains = tuple(name.strip().lower() for name in domains.split(",") if name.strip())
        self._allow_private = allow_private

    def check_url(self, url: str) -> Target:
        """Return the parts of a URL. Raises MediaError if it is malformed, or its server or port is not allowed."""
        target = parse_url(url)
        if self._domains and not self._is_listed(target.host.removesuffix(".")):
            raise MediaError(
                f"media may not be fetched from {_short(target.host)}; this server allows only the names of "
                "--allowed-media-domains. Send the file itself as a data: URL"
            )
        if target.port not in _PUBLIC_PORTS and not self._allow_private:
            raise MediaError(
                f"media may not be fetched from port {target.port}, but only from ports "
                f"{', '.join(map(str, _PUBLIC_PORTS))}"
            )
        return target

    def allows(self, address: Address) -> bool:
        """Return whether media may be fetched from an IP address."""
        if any(address in network for network in _NEVER):
            return False
        if any(address in network for network in _PRIVATE):
            return self._allow_private
        return address.version == 4 or address in _PUBLIC_V6

    def _is_listed(self, host: str) -> bool:
        return any(host == name or (name.startswith(".") and host.endswith(name)) for name in self._domains)


def parse_url(url: str) -> Target:
    """Return the parts of a URL. Raises MediaError if it is malformed or ambiguous, or neither http nor https."""
    if len(url) > _MAX_URL_CHARACTERS or _FORBIDDEN_CHARACTER.search(url):
        raise MediaError(
            f"a URL must have at most {_MAX_URL_CHARACTERS} characters, and no control characters or lone surrogates"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise MediaError(f"the URL is not valid: {error}") from None
    if parts.scheme not in _SCHEME_PORTS:
        raise MediaError(f"the URL must begin with http:, https:, data: or file:, not with {_short(parts.scheme)!r}")
    if "@" in parts.netloc:
        raise MediaError("the URL must not have a user name or a password")
    if not _is_host(host, bracketed="[" in parts.netloc):
        raise MediaError(
            f"the URL has no valid host ({_short(host)!r}); write a name in ASCII, an IPv4 address as four decimal "
            "numbers, or an IPv6 address in brackets"
        )
    path = quote(parts.path or "/", safe=_URL_PUNCTUATION)
    if parts.query:
        path += "?" + quote(parts.query, safe=_URL_PUNCTUATION)
    return Target(parts.scheme, host, _SCHEME_PORTS[parts.scheme] if port is None else port, path)


def _is_host(host: str, bracketed: bool) -> bool:
    if bracketed:
        return _is_address(host, ipaddress.IPv6Address) and "%" not in host
    # Systems read numbers such as 0x7f.1, 017700000001 and 2130706433 as addresses of IPv4. Only one spelling is clear.
    if _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]):
        return _is_address(host, ipaddress.IPv4Address)
    return len(host) <= 253 and _HOST_NAME.fullmatch(host) is not None


def _is_address(text: str, kind: type[Address]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    return text[:80]
