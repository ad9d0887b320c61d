"""Errors cross the wire unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from paceline.core.errors import (
    BusyError,
    ConfigError,
    InvalidRequestError,
    PacelineError,
    StaleError,
    UnavailableError,
)
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import MAX_MESSAGE_BYTES, RpcServer, is_serving, open_channel
from paceline.services.common.rpc_errors import mapped_errors, unmapped_error
from paceline.services.common.tasks import heeding_cancellation, own_cancellation


class Failing(pb_grpc.KVTransferServicer):
    """A service whose calls all fail with `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def Ledger(self, request: pb.LedgerRequest, context: grpc.aio.ServicerContext) -> pb.LedgerReply:  # type: ignore[override, type-arg]
        async with mapped_errors(context):
            raise self._error


@contextlib.asynccontextmanager
async def serve(error: Exception) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer("127.0.0.1", 0, Credentials(), "failing")
    pb_grpc.add_KVTransferServicer_to_server(Failing(error), server.server)
    async with open_channel(f"127.0.0.1:{await server.start()}", Credentials()) as channel:
        await server.set_ready(True)
        yield channel
    await server.close(0)


async def received(error: Exception) -> PacelineError:
    """Return the error that a caller gets when the service raises `error`."""
    async with serve(error) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.KVTransferStub(channel).Ledger(pb.LedgerRequest(), timeout=10)
    return unmapped_error(caught.value, "the other side")


@pytest.mark.parametrize("came", [grpc.aio.UsageError("full"), "a reply"])
async def test_a_cancellation_that_grpc_drops_still_ends_the_wait(came: Exception | str) -> None:
    async def read() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            if isinstance(came, Exception):
                raise came from None
        return str(came)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await heeding_cancellation(read())


async def test_a_cancellation_that_is_not_the_tasks_own_is_an_error() -> None:
    async def wait(cancels: bool) -> None:
        with own_cancellation(lambda: UnavailableError("cancelled")):
            if cancels:
                raise asyncio.CancelledError
            await asyncio.sleep(10)

    with pytest.raises(UnavailableError):
        await wait(True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await wait(False)


@pytest.mark.parametrize("kind", [InvalidRequestError, BusyError, StaleError])
async def test_an_error_that_callers_act_on_stays_what_it_is(kind: type[PacelineError]) -> None:
    error = await received(kind("there is äö no room"))
    assert (type(error), str(error)) == (kind, "there is äö no room")


async def test_the_field_at_fault_is_named_to_the_caller() -> None:
    error = await received(InvalidRequestError("too long", "prompt"))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "prompt"


async def test_an_error_without_a_field_names_none() -> None:
    error = await received(InvalidRequestError("too odd"))
    assert isinstance(error, InvalidRequestError)
    assert error.param is None


@pytest.mark.parametrize("kind", [UnavailableError, ConfigError])
async def test_whatever_else_goes_wrong_is_told_with_its_side(kind: type[PacelineError]) -> None:
    error = await received(kind("it broke"))
    assert (type(error), str(error)) == (UnavailableError, "the other side: it broke")


async def test_a_message_that_is_too_large_is_no_lack_of_room() -> None:
    request = pb.FetchRequest(source="x" * (MAX_MESSAGE_BYTES + 1))
    async with serve(BusyError("full")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.KVTransferStub(channel).Fetch(request, timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = unmapped_error(caught.value, "the other side")
    assert isinstance(error, InvalidRequestError)
    assert "send a smaller request" in str(error)


async def test_a_bug_is_logged_there_and_told_here(caplog: pytest.LogCaptureFixture) -> None:
    error = await received(ZeroDivisionError("division by zero"))
    assert str(error) == "the other side failed with an unexpected error; its log has it"
    assert "unexpected error in a call" in caplog.text


async def test_a_service_is_healthy_under_its_own_name_alone() -> None:
    async with serve(BusyError("")) as channel:
        assert await is_serving(channel, timeout=10)
        assert await is_serving(channel, "failing", timeout=10)
        assert not await is_serving(channel, "a stranger", timeout=10)


async def test_a_second_service_on_a_taken_port_is_told_the_flag() -> None:
    first = RpcServer("127.0.0.1", 0, Credentials())
    port = await first.start()
    second = RpcServer("127.0.0.1", port, Credentials())
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
        await second.start()
    await first.close(0)


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
async def test_ipv6_listens_too() -> None:
    server = RpcServer("::1", 0, Credentials())
    port = await server.start()
    await server.set_ready(True)
    async with open_channel(f"[::1]:{port}", Credentials()) as channel:
        assert await is_serving(channel, timeout=10)
    await server.close(0)
