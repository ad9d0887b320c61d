"""What commands send to a gateway, and to whom else not."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.client import GatewayClient, _origin
from paceline.core.errors import UnavailableError

KEY = "a-secret"


@contextmanager
def server(location: str = "") -> Iterator[tuple[str, list[str | None]]]:
    """Yield the URL of a server, which redirects /first, and the keys that it gets."""
    keys: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            is_first = self.path == "/first"
            self.send_response(302 if is_first else 200)
            if is_first:
                self.send_header("Location", f"{location}/second")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}", keys
        finally:
            serving.shutdown()
            thread.join()


def test_a_redirect_within_the_gateway_is_followed() -> None:
    with server() as (url, keys):
        assert GatewayClient(url, KEY).fetch("/first") == {}
    assert keys == [f"Bearer {KEY}"] * 2


def test_a_redirect_to_another_host_does_not_get_the_key() -> None:
    with server() as (other, stolen), server(other) as (url, _):
        with pytest.raises(UnavailableError, match=f"redirects to {other}, which would get the API key"):
            GatewayClient(url, KEY).fetch("/first")
        assert not stolen
        assert GatewayClient(url).fetch("/first") == {}  # without a key there is nothing to lose
    assert stolen == [None]


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("http://h/a", "HTTP://H:80/b", True),
        ("https://h", "https://h:443", True),
        ("http://h:443", "https://h:443", False),
        ("http://h", "http://h:8000", False),
        ("http://[::1]:80", "http://[::1]", True),
        ("http://h", "http://user@h", True),
    ],
)
def test_a_port_may_be_left_out_if_it_is_the_scheme_s_own(one: str, other: str, are_equal: bool) -> None:
    assert (_origin(one) == _origin(other)) is are_equal
