"""Which requests come from this machine, and which ones a browser sends for somebody else's page."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from paceline.services.gateway.http.access.callers import is_foreign_page, is_local, is_rebound

TCP = ("127.0.0.1", 8000)
SOCKET = ("/run/paceline.sock", None)


def scope(client: tuple[str, int] | None = ("127.0.0.1", 1), server: Any = TCP, method: str = "GET") -> dict[str, Any]:
    return {"type": "http", "method": method, "client": client, "server": server}


@pytest.mark.parametrize(
    ("client", "server", "expected"),
    [
        (("127.0.0.1", 1), TCP, True),
        (("127.8.9.10", 1), TCP, True),
        (("::1", 1), ("::1", 8000), True),
        (("::ffff:127.0.0.1", 1), ("::", 8000), True),
        (("::ffff:10.0.0.1", 1), ("::", 8000), False),
        (("10.0.0.1", 1), TCP, False),
        (("203.0.113.9", 1), TCP, False),
        (("localhost", 1), TCP, False),
        (None, SOCKET, True),
        (None, TCP, False),
        (None, None, False),
    ],
)
def test_local_peers(client: tuple[str, int] | None, server: Any, expected: bool) -> None:
    assert is_local(scope(client, server), Headers()) is expected


@pytest.mark.parametrize(
    "name", ["Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host"]
)
def test_what_a_proxy_forwards_is_not_local(name: str) -> None:
    assert not is_local(scope(), Headers({name: "127.0.0.1"}))
    assert not is_local(scope(None, SOCKET), Headers({name: ""}))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"host": "h:1", "origin": "http://h:1"}, False),
        ({"host": "H:1", "origin": "https://h:1"}, False),
        ({"host": "h:1", "origin": "http://h:2"}, True),
        ({"host": "h:1", "origin": "http://evil.example"}, True),
        ({"host": "h:1", "origin": "null"}, True),
        ({"host": "h:1", "origin": ""}, True),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, True),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, False),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, True),
        # A proxy in front may change Host, so the browser's own word counts more.
        ({"sec-fetch-site": "same-origin", "host": "inner", "origin": "https://outer"}, False),
    ],
)
def test_pages_of_others(headers: dict[str, str], expected: bool) -> None:
    assert is_foreign_page(scope(), Headers(headers)) is expected


def test_a_form_of_another_page_is_no_link() -> None:
    form = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert is_foreign_page(scope(method="POST"), Headers(form))


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "[::1]"),
        *("0.0.0.0:8000", "0.0.0.0", "10.0.0.1:8000", "[::]:8000", "[fe80::1]", "203.0.113.9"),
    ],
)
def test_names_of_this_machine_and_addresses(host: str) -> None:
    assert not is_rebound(scope(), Headers({"host": host}))


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "10.0.0.1.evil.example", "[::1", "", "0.0.0.0.0", "10.0.0.256"]
)
def test_other_names_over_loopback_may_be_a_trick(host: str) -> None:
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Accept"):  # a rebound page may send them
        assert is_rebound(scope(), Headers({"host": host, name: "203.0.113.9"}))
    assert not is_rebound(scope(("203.0.113.9", 1)), Headers({"host": host}))
    assert not is_rebound(scope(None, SOCKET), Headers({"host": host}))


def test_without_a_host_it_is_no_browser() -> None:
    assert not is_rebound(scope(), Headers())
