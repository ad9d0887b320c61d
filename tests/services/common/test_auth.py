"""Callers without the secret are refused, whatever method they call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from paceline.core.errors import RefusedError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.proto import kvtransfer_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common.auth import REFUSAL
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer, is_serving, open_channel
from paceline.services.common.secret import Secret
from paceline.services.worker.kv_client import KVClient
from tests.fuzz.messages import Method, methods

SECRET = Secret("the secret of this cluster")
OURS = Credentials(SECRET)
OTHER = Secret("the secret of another one")
THEIRS = Credentials(OTHER)


class Open(kvtransfer_pb2_grpc.KVTransferServicer, worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer):
    """A server of three of the four services. It records the metadata of the calls that were let in."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str]] = []

    def _came(self, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        self.metadata.append(dict(context.invocation_metadata() or ()))  # type: ignore[arg-type]

    async def Ledger(self, request, context):  # type: ignore[no-untyped-def]
        self._came(context)
        return kvtransfer_pb2.LedgerReply(total=7)

    async def Run(self, request, context):  # type: ignore[no-untyped-def]
        self._came(context)
        yield worker_pb2.PrefillEvent()

    async def Generate(self, commands, context):  # type: ignore[no-untyped-def]
        self._came(context)
        async for _ in commands:
            yield worker_pb2.DecodeEvent()


@contextlib.asynccontextmanager
async def serving(credentials: Credentials = OURS) -> AsyncIterator[tuple[str, Open]]:
    server, service = RpcServer("127.0.0.1", 0, credentials, "open"), Open()
    kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(service, server.server)
    worker_pb2_grpc.add_PrefillServicer_to_server(service, server.server)
    worker_pb2_grpc.add_DecodeServicer_to_server(service, server.server)
    address = f"127.0.0.1:{await server.start()}"
    await server.set_ready(True)
    try:
        yield address, service
    finally:
        await server.close(0)


async def outcome(address: str, credentials: Credentials, method: str) -> tuple[grpc.StatusCode, str | None]:
    """Call a method without sending anything, and return the status and the details with which the call ends."""
    async with open_channel(address, credentials) as channel:
        call = channel.stream_stream(method)(timeout=10)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        return await call.code(), await call.details()


@pytest.mark.parametrize("credentials", [Credentials(), THEIRS], ids=["none", "another"])
@pytest.mark.parametrize("method", methods(), ids=lambda method: method.path)
async def test_every_method_of_every_service_refuses_strangers(method: Method, credentials: Credentials) -> None:
    async with serving() as (address, service):
        assert await outcome(address, credentials, method.path) == (grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
        assert service.metadata == []


def test_the_methods_are_those_that_there_are() -> None:
    paths = {method.path for method in methods()}
    assert {"/paceline.v1.KVTransfer/Attach", "/paceline.v1.Decode/Generate", "/grpc.health.v1.Health/Check"} <= paths


async def test_strangers_are_not_even_told_which_methods_there_are() -> None:
    async with serving() as (address, _):
        assert (await outcome(address, Credentials(), "/no/such"))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await outcome(address, OURS, "/no/such"))[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", SECRET.reveal()),),
        (("authorization", f"bearer {SECRET.reveal()}"),),
        (("authorization", f"Bearer {SECRET.reveal()} "),),
        (("authorization", f"Bearer {SECRET.reveal()}"), ("authorization", "Bearer x")),
        (("x-authorization", f"Bearer {SECRET.reveal()}"),),
    ],
)
async def test_almost_the_right_words_are_wrong(metadata: tuple[tuple[str, str], ...]) -> None:
    async with serving() as (address, service), open_channel(address, Credentials()) as channel:
        call = channel.unary_unary("/paceline.v1.KVTransfer/Ledger")(b"", timeout=10, metadata=metadata)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert service.metadata == []


async def test_who_knows_it_gets_through_with_all_kinds_of_calls_and_their_metadata() -> None:
    trace = (("traceparent", "00-1-1-00"),)
    async with serving() as (address, service), open_channel(address, OURS) as channel:
        ledger = await kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger(
            kvtransfer_pb2.LedgerRequest(), timeout=10, metadata=trace
        )
        prefill = worker_pb2_grpc.PrefillStub(channel).Run(worker_pb2.PrefillRequest(), timeout=10, metadata=trace)
        events = [event async for event in prefill]
        decode = worker_pb2_grpc.DecodeStub(channel).Generate(timeout=10, metadata=trace)  # type: ignore[call-arg]
        await decode.write(worker_pb2.DecodeCommand())
        await decode.done_writing()
        events += [event async for event in decode]
        assert (ledger.total, len(events)) == (7, 2)
        assert [each["traceparent"] for each in service.metadata] == ["00-1-1-00"] * 3
        assert await is_serving(channel, "open", timeout=10)


async def test_a_question_about_health_says_that_we_are_strangers() -> None:
    async with serving() as (address, _), open_channel(address, THEIRS) as channel:
        with pytest.raises(RefusedError, match=r"open refuses us: .* same --auth-token-file"):
            await is_serving(channel, "open", timeout=10)


async def test_without_a_secret_a_server_takes_everybody() -> None:
    async with serving(Credentials()) as (address, _), open_channel(address, OURS) as channel:
        assert await is_serving(channel, timeout=10)


async def test_a_worker_that_kvtransfer_refuses_gives_up_at_once() -> None:
    layout = make_layout((GroupShape("g", (0,), 1, 8),), 4, "model")
    async with serving() as (address, _):
        client = KVClient(address, "w", "decode", THEIRS)
        async with asyncio.timeout(20):  # it would retry for a minute if kvtransfer did not answer
            with pytest.raises(RefusedError, match=f"kvtransfer at {address} refuses us: .*--auth-token-file"):
                await client.session.attach(layout, 16)
        await client.session.close()


@pytest.mark.parametrize(
    ("host", "credentials", "warns"),
    [("0.0.0.0", Credentials(), True), ("0.0.0.0", OURS, False), ("127.0.0.1", Credentials(), False)],
)
async def test_an_open_door_to_the_network_is_told(
    host: str, credentials: Credentials, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = RpcServer(host, 0, credentials, "open")
    with caplog.at_level(logging.WARNING):
        await server.start()
    await server.close(0)
    assert ("--auth-token-file" in caplog.text) is warns


async def test_the_secret_shows_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serving() as (address, _), open_channel(address, OURS) as channel:
            ledger = kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger
            assert (await ledger(kvtransfer_pb2.LedgerRequest(), timeout=10)).total == 7
            code, _ = await outcome(address, THEIRS, "/paceline.v1.KVTransfer/Ledger")
            assert code is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET.reveal() not in caplog.text
    assert OTHER.reveal() not in caplog.text
