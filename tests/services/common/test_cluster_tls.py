"""TLS between services: who is let in, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.core.errors import ConfigError, UntrustedError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.proto import kvtransfer_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common import certificates, tls_channel
from paceline.services.common.certificates import CertificateFiles
from paceline.services.common.credentials import ClusterTls, Credentials
from paceline.services.common.rpc import RpcServer, is_serving, open_channel
from paceline.services.common.secret import Secret
from paceline.services.worker import kv_session
from paceline.services.worker.kv_client import KVClient
from tests.authority import Authority

TEXT = "the secret of this cluster"
SECRET = Secret(TEXT)


class Echo(kvtransfer_pb2_grpc.KVTransferServicer, worker_pb2_grpc.DecodeServicer):
    async def Ledger(self, request, context):  # type: ignore[no-untyped-def]
        return kvtransfer_pb2.LedgerReply(total=7)

    async def Generate(self, commands, context):  # type: ignore[no-untyped-def]
        async for _ in commands:
            yield worker_pb2.DecodeEvent()


@contextlib.asynccontextmanager
async def serving(credentials: Credentials, port: int = 0) -> AsyncIterator[str]:
    server = RpcServer("127.0.0.1", port, credentials, "echo")
    kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(Echo(), server.server)
    worker_pb2_grpc.add_DecodeServicer_to_server(Echo(), server.server)
    address = f"127.0.0.1:{await server.start()}"
    await server.set_ready(True)
    try:
        yield address
    finally:
        await server.close(0)


async def is_let_in(address: str, credentials: Credentials) -> bool:
    """Return whether a health check succeeds. Raises UntrustedError."""
    async with open_channel(address, credentials) as channel:
        return await is_serving(channel, "echo", timeout=10)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> CertificateFiles:
    return authority.issue(tmp_path / "own", "127.0.0.1")


def tls(files: CertificateFiles, name: str = "") -> Credentials:
    return Credentials(SECRET, ClusterTls(files, name))


async def test_all_kinds_of_calls_work_with_the_secret(files: CertificateFiles) -> None:
    async with serving(tls(files)) as address, open_channel(address, tls(files)) as channel:
        assert await is_serving(channel, "echo", timeout=10)
        ledger = await kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger(kvtransfer_pb2.LedgerRequest(), timeout=10)
        assert ledger.total == 7
        decode = worker_pb2_grpc.DecodeStub(channel).Generate(timeout=10)  # type: ignore[call-arg]
        await decode.write(worker_pb2.DecodeCommand())
        await decode.done_writing()
        assert len([event async for event in decode]) == 1


async def test_the_secret_is_still_needed(files: CertificateFiles) -> None:
    async with serving(tls(files)) as address, open_channel(address, Credentials(tls=ClusterTls(files))) as channel:
        with pytest.raises(ConfigError, match="--auth-token-file"):
            await is_serving(channel, "echo", timeout=10)


async def test_a_certificate_of_another_authority_is_refused_by_both_sides(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "elsewhere").issue(tmp_path / "stranger", "127.0.0.1")
    trusting = CertificateFiles(stranger.certfile, stranger.keyfile, str(authority.file))
    async with serving(tls(files)) as address:
        with pytest.raises(UntrustedError, match="does not accept our certificate"):
            await is_let_in(address, tls(trusting))
        with pytest.raises(UntrustedError, match=r"is not valid, unable to get local issuer .*--cluster-ca-certs"):
            await is_let_in(address, tls(stranger))


async def test_an_expired_certificate_is_refused_by_both_sides(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    expired = authority.issue(tmp_path / "expired", "127.0.0.1", expired=True)
    async with serving(tls(files)) as address:
        with pytest.raises(UntrustedError, match="does not accept our certificate"):
            await is_let_in(address, tls(expired))
    async with serving(tls(expired)) as address:
        with pytest.raises(UntrustedError, match="certificate has expired"):
            await is_let_in(address, tls(files))


async def test_a_certificate_must_have_the_address(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "other", "10.0.0.1", "worker.example")
    async with serving(tls(files)) as address:
        with pytest.raises(UntrustedError, match="subject alternative names"):
            await is_let_in(address, tls(files))
        assert await is_let_in(address, tls(files, "worker.example"))


async def test_one_name_for_all_is_enough(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "other", "paceline")
    async with serving(tls(files, "paceline")) as address:
        assert await is_let_in(address, tls(files, "paceline"))
        with pytest.raises(UntrustedError, match="subject alternative names"):
            await is_let_in(address, tls(files, "another"))


async def test_clear_text_and_tls_do_not_meet(files: CertificateFiles) -> None:
    async with serving(tls(files)) as address:
        with pytest.raises(UntrustedError, match="speaks TLS and we do not"):
            await is_let_in(address, Credentials(SECRET))
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                assert TEXT.encode() not in await reader.read()
        writer.close()
    async with serving(Credentials(SECRET)) as address:
        with pytest.raises(UntrustedError, match="does not speak TLS"):
            await is_let_in(address, tls(files))


async def test_a_call_outlives_renewals_and_new_connections_use_the_new_files(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    own = authority.issue(tmp_path / "client", "client")
    async with serving(tls(files)) as address, open_channel(address, tls(own)) as channel:
        decode = worker_pb2_grpc.DecodeStub(channel).Generate(timeout=60)  # type: ignore[call-arg]
        await decode.write(worker_pb2.DecodeCommand())
        await decode.read()
        authority.issue(tmp_path / "own", "127.0.0.1", expired=True)
        with pytest.raises(UntrustedError, match="certificate has expired"):
            await is_let_in(address, tls(own))  # so the server has read the new file
        await decode.write(worker_pb2.DecodeCommand())
        await decode.read()
        assert await is_serving(channel, "echo", timeout=10)
        authority.issue(tmp_path / "own", "127.0.0.1")
        assert await is_let_in(address, tls(own))
        await decode.done_writing()
        assert await decode.read() is grpc.aio.EOF


async def test_a_channel_whose_certificate_has_expired_connects_again_with_the_renewed_one(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    own = authority.issue(tmp_path / "client", "client", expired=True)
    async with serving(tls(files)) as address, open_channel(address, tls(own)) as channel:
        ledger = kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger  # made once, as services do
        with pytest.raises(UntrustedError):
            await is_serving(channel, "echo", timeout=10)
        authority.issue(tmp_path / "client", "client")
        assert await is_serving(channel, "echo", timeout=10)
        assert (await ledger(kvtransfer_pb2.LedgerRequest(), timeout=10)).total == 7


async def test_a_channel_finds_a_restarted_server_of_another_authority(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    async with serving(tls(files)) as address:
        channel = open_channel(address, tls(files))
        assert await is_serving(channel, "echo", timeout=10)
    successor = Authority(tmp_path / "successor")
    renewed = successor.issue(tmp_path / "own", "127.0.0.1")
    authority.file.write_bytes(successor.file.read_bytes())
    async with channel, serving(tls(renewed), int(address.rpartition(":")[2])), asyncio.timeout(20):
        while not await is_serving(channel, "echo", timeout=10):
            await asyncio.sleep(0.05)


async def test_a_channel_that_was_replaced_is_closed(
    authority: Authority, files: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[grpc.aio.Channel] = []

    def open_unconnected(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        opened.append(grpc.aio.secure_channel("127.0.0.1:9", credentials))
        return opened[-1]

    channel = tls_channel.TlsChannel(ClusterTls(files), open_unconnected)
    ledger = kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger
    waiting = ledger(kvtransfer_pb2.LedgerRequest(), wait_for_ready=True)
    authority.issue(tmp_path / "own", "127.0.0.1")
    with pytest.raises(grpc.aio.AioRpcError):
        await ledger(kvtransfer_pb2.LedgerRequest(), timeout=5)
    assert len(opened) == 2
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for each in opened:
        assert each.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_files_that_cannot_be_used_change_nothing(
    files: CertificateFiles, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = tls(authority.issue(tmp_path / "client", "client"))
    async with serving(tls(files)) as address:
        (tmp_path / "own" / "key.pem").write_text("half a k")
        assert await is_let_in(address, ours)
        assert await is_let_in(address, ours)
        logged = [record for record in caplog.records if record.name == certificates.__name__]
        errors = [record.getMessage() for record in logged if record.levelno == logging.ERROR]
        assert len(errors) == 1  # gRPC may log an error of an event loop of an earlier test
        assert "the old ones stay in use" in errors[0]


async def test_a_worker_says_why_it_does_not_join(
    files: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_session, "ATTACH_SECONDS", 0.5)
    layout = make_layout((GroupShape("g", (0,), 1, 8),), 4, "model")
    stranger = Authority(tmp_path / "elsewhere").issue(tmp_path / "stranger", "127.0.0.1")
    async with serving(tls(files)) as address:
        client = KVClient(address, "w", "decode", tls(stranger))
        with pytest.raises(UntrustedError, match="is not valid"):
            await client.session.attach(layout, 16)
        await client.session.close()


async def test_certificates_guard_a_service_without_a_secret(
    files: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = RpcServer("0.0.0.0", 0, Credentials(tls=ClusterTls(files)), "echo")
    with caplog.at_level(logging.WARNING):
        await server.start()
    await server.close(0)
    # grpc may log an error of an earlier test's event loop now.
    assert not [record for record in caplog.records if record.name.startswith("paceline")]
