"""Files are fetched over real connections, from servers that do all they can to harm the gateway."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from paceline.core.errors import BusyError
from paceline.services.gateway.http.errors import MediaError, UnreachableMediaError
from paceline.services.gateway.planning.media.body import PIECE_COST, UNPACKED_BYTES, Pace
from paceline.services.gateway.planning.media.fetch import Fetcher, Resolver
from paceline.services.gateway.planning.media.guard import Address, MediaGuard
from tests.services.gateway.conftest import eventually
from tests.services.gateway.planning.media.hostile_server import (
    BROKEN,
    CHUNKED,
    FILE,
    SLOW,
    TOO_MUCH,
    Handler,
    answer,
    redirect,
    response,
    serve,
)

MAX_BYTES = 100_000


class Names:
    """A resolver that gives the next answer for each question, and the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._answers = [list(answer) for answer in answers]

    async def __call__(self, host: str, /) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def local() -> Names:
    return Names(["127.0.0.1"])


def fetcher(guard: MediaGuard | None = None, resolve: Resolver | None = None) -> Fetcher:
    return Fetcher(guard or MediaGuard(allow_private=True), resolve or local(), MAX_BYTES)


def count_nothing(count: int) -> None:
    pass


async def fetch(url: str, fetcher: Fetcher, seconds: float = 20.0) -> bytes:
    return bytes(await fetcher.fetch(url, seconds, count_nothing))


def batched(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


FILES: dict[str, Handler] = {
    "with its length": answer(response(FILE)),
    "in chunks": answer(
        CHUNKED, *(b"c8\r\n" + FILE[at : at + 200] + b"\r\n" for at in range(0, len(FILE), 200)), b"0\r\n\r\n"
    ),
    "until the connection ends": answer(response(FILE, Content_Length="")),
    "packed": answer(response(gzip.compress(FILE), Content_Encoding="gzip")),
    "packed, in small chunks": answer(
        CHUNKED[:-2] + b"Content-Encoding: gzip\r\n\r\n",
        *(b"%x\r\n%b\r\n" % (len(part), part) for part in batched(gzip.compress(FILE), 100)),
        b"0\r\n\r\n",
    ),
    "after an interim response": answer(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3, response(FILE)),
    "with more behind": answer(response(FILE), b"more"),
}


@pytest.mark.parametrize("how", FILES)
async def test_fetches_file(how: str) -> None:
    async with serve({"/": FILES[how]}) as server:
        assert await fetch(server.url(), fetcher()) == FILE


def test_fetches_with_the_loop_of_the_server() -> None:
    async def run() -> bytes:
        async with serve({"/": FILES["in chunks"]}) as server:
            return await fetch(server.url(), fetcher())

    assert uvloop.run(run()) == FILE


async def test_sends_plain_request() -> None:
    async with serve({"/a%20b?c=d": answer(response(FILE))}) as server:
        await fetch(server.url("/a b?c=d#e"), fetcher())
    lines = server.heads[0].decode().lower().split("\r\n")
    assert lines[0] == "get /a%20b?c=d http/1.1"
    assert f"host: media.test:{server.port}" in lines
    assert not any(line.startswith(("cookie", "authorization", "referer")) for line in lines)


async def test_counts_bytes_as_they_come() -> None:
    async with serve({"/": FILES["in chunks"]}) as server:
        taken = []
        await fetcher().fetch(server.url(), 20.0, taken.append)
        assert sum(taken) == len(FILE)

        def refuse(count: int) -> None:
            raise BusyError("full")

        with pytest.raises(BusyError):
            await fetcher().fetch(server.url(), 20.0, refuse)


async def test_unpacks_a_large_file_in_small_parts() -> None:
    file = bytes(2 * UNPACKED_BYTES)  # a thousandth of this arrives in one piece
    page = answer(response(gzip.compress(file), Content_Encoding="gzip"))
    async with serve({"/": page}) as server:
        taken: list[int] = []
        own = Fetcher(MediaGuard(allow_private=True), local(), len(file))
        assert await own.fetch(server.url(), 20.0, taken.append) == file
        own.close()
    assert max(taken) == UNPACKED_BYTES


class NotedPace(Pace):
    """Notes what is counted, and does not slow down."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = self.unrested = 0

    def count(self, handled: int) -> None:
        self.counted += handled
        self.unrested += handled

    async def rest(self) -> None:
        await super().rest()
        self.unrested = 0


@pytest.mark.parametrize("is_packed", [False, True])
async def test_files_have_one_pace_that_counts_what_comes_and_what_is_unpacked(is_packed: bool) -> None:
    pace, packed = NotedPace(), gzip.compress(FILE)
    own = Fetcher(MediaGuard(allow_private=True), local(), MAX_BYTES, pace)
    sent = response(packed, Content_Encoding="gzip") if is_packed else response(FILE)
    async with serve({"/": answer(sent)}) as server:
        for _ in range(2):
            await own.fetch(server.url(), 20.0, count_nothing)
    own.close()
    handled = len(sent) + len(FILE) * is_packed
    assert pace.unrested <= 10 * PIECE_COST  # a rest follows each read
    assert 2 * (handled + PIECE_COST) <= pace.counted <= 2 * (handled + 10 * PIECE_COST)


@pytest.mark.parametrize("how", TOO_MUCH)
async def test_refuses_more_than_the_limit(how: str) -> None:
    async with serve({"/": TOO_MUCH[how]}) as server:
        with pytest.raises(MediaError, match="--max-media-size") as caught:
            await fetch(server.url(), fetcher())
        assert caught.value.status == 400
        await eventually(lambda: server.open == 0)


@pytest.mark.parametrize("how", BROKEN)
async def test_dead_url_is_unreachable(how: str) -> None:
    async with serve({"/": BROKEN[how]}) as server:
        with pytest.raises(MediaError) as caught:
            await fetch(server.url(), fetcher())
        assert isinstance(caught.value, UnreachableMediaError), caught.value
        assert caught.value.status == 422


@pytest.mark.parametrize("how", SLOW)
async def test_leaves_slow_server(how: str) -> None:
    async with serve({"/": SLOW[how]}) as server:
        with pytest.raises(UnreachableMediaError, match="within 0"):
            await fetch(server.url(), fetcher(), seconds=0.3)


async def test_cancelled_download_closes_its_connection() -> None:
    async with serve({"/": SLOW["drips its file"]}) as server:
        task = asyncio.create_task(fetch(server.url(), fetcher()))
        await eventually(lambda: server.open == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: server.open == 0)


async def test_unknown_encoding_is_refused() -> None:
    async with serve({"/": answer(response(FILE, Content_Encoding="br"))}) as server:
        with pytest.raises(MediaError, match="Content-Encoding 'br'"):
            await fetch(server.url(), fetcher())


FORBIDDEN = [
    "http://127.0.0.1/",
    "http://localhost/",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://10.0.0.1/",
    "http://100.64.0.1/",
    "http://0.0.0.0/",
    "http://[fe80::1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://2130706433/",
    "https://0x7f.1/",
]


async def by_itself(host: str, /) -> Sequence[str]:
    """Resolve as a system does, but without asking a name server."""
    return ["127.0.0.1"] if host == "localhost" else [host]


@pytest.mark.parametrize("url", FORBIDDEN)
async def test_refuses_private_server(url: str) -> None:
    with pytest.raises(MediaError) as caught:
        await fetch(url, fetcher(MediaGuard(), by_itself))
    assert caught.value.status == 400


class OneAddress(MediaGuard):
    """A guard that allows 127.0.0.1, as if it were public, and no other address."""

    def __init__(self) -> None:
        super().__init__(allow_private=True)

    def allows(self, address: Address) -> bool:
        return address == ipaddress.ip_address("127.0.0.1")


async def test_name_server_that_changes_its_mind_has_no_effect() -> None:
    """The address that was checked is the address that is connected to, and a redirect is checked again."""
    async with serve({"/": answer(response(FILE)), "/again": redirect("/")}) as server:
        names = Names(["127.0.0.1"], ["127.0.0.2"])
        assert await fetch(server.url(), fetcher(OneAddress(), names)) == FILE
        assert names.asked == ["media.test"]
        names = Names(["127.0.0.1"], ["127.0.0.2"])
        with pytest.raises(MediaError, match="no public address"):
            await fetch(server.url("/again"), fetcher(OneAddress(), names))
        assert names.asked == ["media.test"] * 2


async def test_connects_to_allowed_addresses_only() -> None:
    async with serve({"/": answer(response(FILE))}) as server:
        names = Names(["127.0.0.2", "10.0.0.1", "127.0.0.1", "::1"])
        assert await fetch(server.url(), fetcher(OneAddress(), names)) == FILE


async def test_unknown_name_and_closed_port_are_unreachable() -> None:
    async def unknown(host: str, /) -> Sequence[str]:
        raise OSError("no such name")

    with pytest.raises(UnreachableMediaError, match="no address"):
        await fetch("http://media.test/", fetcher(resolve=unknown))
    with pytest.raises(UnreachableMediaError, match="cannot be reached"):
        await fetch("http://media.test:1/", fetcher())


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for media.test that nobody else has signed, and its key."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=media.test"
    options = ["-addext", "subjectAltName=DNS:media.test", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *options], check=True, capture_output=True)
    return certificate, key


async def test_verifies_certificate_for_the_name(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    async with serve({"/": answer(response(FILE))}, tls) as server:
        with pytest.raises(UnreachableMediaError, match="certificate"):
            await fetch(f"https://media.test:{server.port}/", fetcher())
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert await fetch(f"https://media.test:{server.port}/", fetcher()) == FILE
        with pytest.raises(UnreachableMediaError, match="certificate"):
            await fetch(f"https://other.test:{server.port}/", fetcher())
