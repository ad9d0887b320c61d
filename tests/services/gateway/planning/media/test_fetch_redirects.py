"""Redirects are followed to servers of HTTP alone, and each is checked like the first URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from paceline.services.gateway.http.errors import MediaError, UnreachableMediaError
from paceline.services.gateway.planning.media.fetch import REDIRECTS
from tests.services.gateway.planning.media.hostile_server import FILE, Handler, answer, redirect, response, serve
from tests.services.gateway.planning.media.test_fetch import FORBIDDEN, OneAddress, by_itself, fetch, fetcher


def chain(length: int) -> Mapping[str, Handler]:
    return {**{f"/{step}": redirect(f"/{step + 1}") for step in range(length)}, f"/{length}": answer(response(FILE))}


async def test_follows_redirects() -> None:
    async with serve(chain(REDIRECTS)) as server:
        assert await fetch(server.url("/0"), fetcher()) == FILE
    async with serve(chain(REDIRECTS + 1)) as server:
        with pytest.raises(UnreachableMediaError, match="redirects"):
            await fetch(server.url("/0"), fetcher())


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/café.png".encode(), "/caf%C3%A9.png"),
        ("/café.png".encode("latin-1"), "/caf%E9.png"),
        (b"/caf%C3%A9.png?a b", "/caf%C3%A9.png?a%20b"),
    ],
)
async def test_a_redirect_leads_to_the_bytes_that_the_server_sends(location: bytes, path: str) -> None:
    moved = answer(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + location + b"\r\n\r\n")
    async with serve({"/": moved, path: answer(response(FILE))}) as server:
        assert await fetch(server.url(), fetcher()) == FILE
    assert server.heads[1].split()[1].decode() == path


@pytest.mark.parametrize("location", ["file:///etc/passwd", "data:;base64,AAAA", "ftp://a/"])
async def test_a_redirect_to_no_url_of_http_is_told(location: str) -> None:
    async with serve({"/": redirect(location)}) as server:
        with pytest.raises(
            MediaError, match=f"begins with '{location.partition(':')[0]}'; .* only lead to http: or https:"
        ):
            await fetch(server.url(), fetcher())


@pytest.mark.parametrize(
    "location", [*FORBIDDEN[2:], "http://127.0.0.2/", "//127.0.0.2/", "file:///etc/passwd", "ftp://a/"]
)
async def test_refuses_redirect_to_private_server(location: str) -> None:
    async with serve({"/": redirect(location, "307 Temporary Redirect")}) as server:

        async def resolve(host: str, /) -> Sequence[str]:
            return ["127.0.0.1"] if host == "media.test" else await by_itself(host)

        with pytest.raises(MediaError) as caught:
            await fetch(server.url(), fetcher(OneAddress(), resolve))
        assert caught.value.status == 400
        assert len(server.heads) == 1
