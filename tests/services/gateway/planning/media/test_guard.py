"""The guard allows public addresses only, however they are written."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.guard import MediaGuard, parse_url

PUBLIC = ["1.1.1.1", "93.184.216.34", "172.15.255.255", "172.32.0.1", "223.255.255.255", "2606:4700::1111", "2a00::1"]
PRIVATE = ["10.1.2.3", "127.0.0.1", "127.255.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd00::1"]
NEVER = [
    "0.0.0.0",
    "169.254.169.254",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "192.88.99.1",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "240.0.0.1",
    "::",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:1.1.1.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2002:7f00:1::",
    "2001:db8::1",
    "3fff::1",
    "5f00::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "fd00:ec2::254",
    "fd20:ce::254",
]


@pytest.mark.parametrize("text", PUBLIC)
def test_allows_public_address(text: str) -> None:
    assert MediaGuard().allows(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PRIVATE)
def test_allows_private_address_only_if_told(text: str) -> None:
    assert not MediaGuard().allows(ipaddress.ip_address(text))
    assert MediaGuard(allow_private=True).allows(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", NEVER)
def test_never_allows_special_address(text: str) -> None:
    assert not MediaGuard().allows(ipaddress.ip_address(text))
    assert not MediaGuard(allow_private=True).allows(ipaddress.ip_address(text))


@given(st.ip_addresses())
def test_allows_no_address_that_python_knows_to_be_special(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    special = address.is_private or address.is_multicast or address.is_reserved or address.is_link_local
    assert not (special and MediaGuard().allows(address))


def test_reads_url() -> None:
    target = parse_url("HTTPS://Example.com:8443/a b/é.png?x=1&y=ü#part")
    assert (target.scheme, target.host, target.port) == ("https", "example.com", 8443)
    assert target.path == "/a%20b/%C3%A9.png?x=1&y=%C3%BC"
    assert target.authority == "example.com:8443"
    assert parse_url("http://[2606:4700::1]/").authority == "[2606:4700::1]"
    assert parse_url("http://example.com").url == "http://example.com/"


MALFORMED = [
    "",
    "x",
    "//example.com/",
    "ftp://example.com/",
    "gopher://example.com/",
    "javascript:alert(1)",
    "http://",
    "http:///x",
    "http://user@example.com/",
    "http://user:secret@example.com/",
    "http://example.com:99999/",
    "http://example.com:x/",
    "http://[::1/",
    "http://[::1%25eth0]/",
    "http://[127.0.0.1]/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://127.1/",
    "http://0177.0.0.1/",
    "http://127.0.0.1./",
    "http://１２７.0.0.1/",
    "http://bücher.example/",
    "http://exa mple.com/",
    "http://example.com\\@127.0.0.1/",
    "http://127.0.0.1\\.example.com/",
    "http://example.com/\r\nHost: other",
    "http://example.com/\x00",
    "http://127.0.0.1:1/\ud800",
    "https://example.com/?\udfff",
    "http://%31%32%37.0.0.1/",
    "http://-example.com/",
    "http://a..b/",
    "http://" + "a" * 300 + "/",
    "http://example.com/" + "a" * 9000,
]


@pytest.mark.parametrize("url", MALFORMED)
def test_refuses_malformed_url(url: str) -> None:
    with pytest.raises(MediaError):
        parse_url(url)


@given(st.text() | st.text(alphabet="htps:/@[]%.0123456789abcx#?\\ \ud800é").map("http://".__add__))
def test_never_fails_otherwise(url: str) -> None:
    try:
        target = parse_url(url)
    except MediaError:
        return
    # What was read is unambiguous: reading it again gives the same.
    assert parse_url(target.url) == target
    assert target.path.isascii()
    assert not set(target.authority) & set("@/\\ %")


@pytest.mark.parametrize("port", [1, 22, 25, 6379, 8000, 65535])
def test_refuses_port(port: int) -> None:
    with pytest.raises(MediaError, match=f"port {port}"):
        MediaGuard().check_url(f"http://example.com:{port}/")
    assert MediaGuard(allow_private=True).check_url(f"http://example.com:{port}/").port == port


def test_allows_listed_names_only() -> None:
    guard = MediaGuard(" Example.com, .cdn.example.org ")
    for host in ("example.com", "EXAMPLE.COM", "example.com.", "a.cdn.example.org", "a.b.cdn.example.org"):
        guard.check_url(f"http://{host}/")
    for host in ("www.example.com", "example.com.evil.net", "cdn.example.org", "evilcdn.example.org", "1.1.1.1"):
        with pytest.raises(MediaError, match="allowed-media-domains"):
            guard.check_url(f"http://{host}/")
