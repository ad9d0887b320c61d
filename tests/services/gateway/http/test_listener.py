"""The gateway's socket: HTTPS with certificates that are renewed, and Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from paceline.client import GatewayClient
from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import connect, read_members
from paceline.services.gateway.http import listener
from paceline.services.gateway.http.listener import listen
from tests.authority import Authority, serial_number
from tests.services.gateway.conftest import PATIENCE, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT

StartTls = Callable[..., "asyncio.Future[Stack]"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def start_tls(start_stack: StartStack, authority: Authority, tmp_path: Path) -> StartStack:
    """Return a function that starts stacks like `start_stack`, whose gateways have a certificate for 127.0.0.1."""

    async def start(**options: object) -> Stack:
        files = authority.issue(tmp_path, "127.0.0.1")
        names = {"ssl_certfile": files.certfile, "ssl_keyfile": files.keyfile}
        return await start_stack(authority=authority.file, **names, **options)

    return start


async def open_connection(stack: Stack, authority: Authority) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(stack.url)
    return await asyncio.open_connection(url.host, url.port, ssl=ssl.create_default_context(cafile=authority.file))


async def served_number(stack: Stack, authority: Authority) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    _, writer = await open_connection(stack, authority)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return serial_number(certificate)


async def test_a_stream_outlives_a_renewal_and_new_connections_get_the_new_certificate(
    start_tls: StartStack, authority: Authority, tmp_path: Path
) -> None:
    stack = await start_tls()
    first = await served_number(stack, authority)
    stack.pause_decode(after=3)
    async with stack.http.stream("POST", "/v1/completions", json=body(stream=True)) as response:
        lines = response.aiter_lines()
        came = [await anext(lines)]
        authority.issue(tmp_path, "127.0.0.1")
        assert await served_number(stack, authority) != first
        stack.workers["decode-0"].resume.set()
        came += [line async for line in lines]
    assert came[-2] == "data: [DONE]"
    assert (await stack.http.get("/health")).status_code == 200


def body(**more: object) -> dict[str, object]:
    return {"prompt": "x", "max_tokens": 20, "seed": 0, **more}


async def test_files_that_cannot_be_used_change_nothing(
    start_tls: StartStack, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await start_tls()
    first = await served_number(stack, authority)
    (tmp_path / "cert.pem").write_text("half a certif")
    assert await served_number(stack, authority) == first
    assert await served_number(stack, authority) == first
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "the old ones stay in use" in errors[0]
    assert "cert.pem" in errors[0]
    (tmp_path / "key.pem").unlink()
    assert await served_number(stack, authority) == first
    authority.issue(tmp_path, "127.0.0.1")
    assert await served_number(stack, authority) != first


async def test_clients_show_a_certificate_if_they_must(
    start_tls: StartStack, authority: Authority, tmp_path: Path
) -> None:
    stack = await start_tls(prefill=0, decode=0, ssl_ca_certs=str(authority.file), ssl_cert_reqs=2)
    own = authority.issue(tmp_path / "client", "client")
    other = Authority(tmp_path / "other").issue(tmp_path / "stranger", "client")
    async with stack.client(own.certfile, own.keyfile) as client:
        assert (await client.get("/ping")).status_code == 200
    for certificate in ((), (other.certfile, other.keyfile)):
        async with stack.client(*certificate) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/ping")


async def test_authorities_of_clients_are_renewed_too(
    start_tls: StartStack, authority: Authority, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes())
    stack = await start_tls(prefill=0, decode=0, ssl_ca_certs=str(trusted), ssl_cert_reqs=2)
    next_authority = Authority(tmp_path / "next")
    own = next_authority.issue(tmp_path / "client", "client")
    async with stack.client(own.certfile, own.keyfile) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/ping")
    trusted.write_bytes(next_authority.file.read_bytes())
    async with stack.client(own.certfile, own.keyfile) as client:
        assert (await client.get("/ping")).status_code == 200


async def test_a_client_in_the_clear_gets_an_end(start_tls: StartStack) -> None:
    stack = await start_tls(prefill=0, decode=0)
    url = httpx.URL(stack.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in await reader.read()
    writer.close()


async def test_a_handshake_that_never_ends_is_ended(start_tls: StartStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.2)
    stack = await start_tls(prefill=0, decode=0)
    url = httpx.URL(stack.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"\x16\x03\x01")  # the first bytes of a handshake
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_heads_have_their_limit_with_tls_too(start_tls: StartStack, authority: Authority) -> None:
    stack = await start_tls(prefill=0, decode=0)
    reader, writer = await open_connection(stack, authority)
    writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n" + b"X-Large: " + b"x" * 400_000)
    async with asyncio.timeout(PATIENCE):
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_commands_check_the_certificate(start_tls: StartStack, authority: Authority, tmp_path: Path) -> None:
    stack = await start_tls(prefill=0, decode=0)
    fleet = await asyncio.to_thread(GatewayClient(stack.url, ca_certs=str(authority.file)).fetch, "/fleet")
    assert fleet["workers"] == []
    with pytest.raises(UnavailableError, match="--ssl-ca-certs"):
        await asyncio.to_thread(GatewayClient(stack.url).fetch, "/fleet")
    with pytest.raises(ConfigError, match="holds no PEM certificates"):
        await asyncio.to_thread(GatewayClient(stack.url, ca_certs=str(tmp_path / "key.pem")).fetch, "/fleet")


def swap_key(folder: Path) -> None:
    """Write the key of another certificate to `folder`."""
    other = Authority(folder / "other").issue(folder / "other", "127.0.0.1")
    Path(other.keyfile).rename(folder / "key.pem")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "cert.pem").unlink(), r"cannot read .*cert\.pem: No such file"),
        (lambda folder: (folder / "cert.pem").write_text("x"), "no certificate in PEM format"),
        (swap_key, "are no certificate with its key"),
        (lambda folder: (folder / "ca.pem").write_text("x"), "holds no PEM certificates of authorities"),
    ],
    ids=["missing", "empty", "the key of another", "no authorities"],
)
def test_files_are_checked_at_the_start(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    files = Authority(tmp_path).issue(tmp_path, "127.0.0.1")
    damage(tmp_path)
    config = GatewayConfig(
        port=0,
        ssl_certfile=files.certfile,
        ssl_keyfile=files.keyfile,
        ssl_ca_certs=files.ca_certs,
        ssl_cert_reqs=1,
    )
    with pytest.raises(ConfigError, match=message), listen(config):
        pass


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue(tmp_path, "127.0.0.1", password=b"secret")
    config = GatewayConfig(port=0, ssl_certfile=files.certfile, ssl_keyfile=files.keyfile)
    with pytest.raises(ConfigError, match="needs a password"), listen(config):
        pass


async def test_a_unix_socket_is_for_this_user_and_goes_with_the_gateway(
    start_stack: StartStack, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.sock"
    stack = await start_stack(uds=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    answer = await stack.post("/v1/completions", **body())
    assert answer.json()["choices"][0]["text"] == TEXT[:20]
    fleet = await asyncio.to_thread(GatewayClient(f"unix:{path}").fetch, "/fleet")
    assert len(fleet["workers"]) == 2
    client = connect(stack.redis_url)

    async def has_joined() -> bool:
        members = await read_members(client, stack.cluster, UNSIGNED)
        return [member.address for member in members if member.role == "gateway"] == [f"unix:{path}"]

    await eventually(has_joined)
    await client.aclose()
    stack.stop.set()
    await stack.gateway
    assert not os.listdir(tmp_path)


async def test_a_unix_socket_can_have_tls(start_tls: StartStack, tmp_path: Path) -> None:
    stack = await start_tls(prefill=0, decode=0, uds=str(tmp_path / "s"))
    stack.url = "https://127.0.0.1"
    async with stack.client() as client:
        assert (await client.get("/ping")).status_code == 200


def test_a_socket_that_was_left_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with listen(GatewayConfig(uds=str(path))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_server_that_listens_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = GatewayConfig(uds=str(path))
    with listen(config), socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(ConfigError, match="a server listens at --uds"), listen(config):
            pass
        client.connect(str(path))


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"), listen(GatewayConfig(uds=str(tmp_path / "s"))):
        pass
    with pytest.raises(ConfigError, match="choose another path"), listen(GatewayConfig(uds=str(tmp_path / "no/s"))):
        pass
    assert (tmp_path / "s").read_text() == "precious"


def test_the_socket_of_a_successor_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen(GatewayConfig(uds=str(path))):
        path.unlink()
        path.write_text("another's")
    assert path.exists()
