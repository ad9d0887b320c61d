"""Services that do not understand each other say so, whoever calls."""

from __future__ import annotations

import dataclasses

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import RefusedError
from paceline.proto import common_pb2, fleet_pb2, kvtransfer_pb2, kvtransfer_pb2_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import Member
from paceline.services.common.rpc import RpcServer, is_serving, open_channel
from paceline.services.common.rpc_errors import mapped_errors, unmapped_error
from paceline.services.common.wire_version import OURS, UNNAMED, WireVersions, mismatch

RANGES = st.tuples(st.integers(1, 5), st.integers(0, 3)).map(lambda pair: WireVersions(pair[0], pair[0] + pair[1]))


@given(RANGES, RANGES)
def test_both_sides_come_to_the_same_result(one: WireVersions, other: WireVersions) -> None:
    understood = bool({*range(one.oldest, one.newest + 1)} & {*range(other.oldest, other.newest + 1)})
    assert one.overlaps(other) == other.overlaps(one) == understood
    assert understood == (not mismatch("it", other, one)) == (not mismatch("it", one, other))


def test_the_older_side_is_to_be_updated() -> None:
    old, new = WireVersions(1, 2), WireVersions(3, 4)
    assert "update decode worker d," in mismatch("decode worker d", old, new)
    assert "update this service," in mismatch("decode worker d", new, old)


@given(RANGES)
def test_a_range_can_be_sent(versions: WireVersions) -> None:
    assert WireVersions.parse(str(versions)) == WireVersions.from_pb(versions.to_pb()) == versions


@pytest.mark.parametrize("text", ["", "1", "a-b", "1-2-3", b"1-2"])
def test_what_is_no_range_is_none(text: str | bytes) -> None:
    assert WireVersions.parse(text) is None


def test_a_member_of_an_earlier_release_speaks_the_first_version() -> None:
    member = Member("d", "decode", 1, "host:1", "host", wire=WireVersions(2, 3), release="9.9")
    known = Member.from_bytes(member.to_bytes())
    assert known is not None
    assert (known.wire, known.release) == (member.wire, member.release)
    message = fleet_pb2.Member.FromString(member.to_bytes())
    message.ClearField("wire")
    message.ClearField("release")
    before = Member.from_bytes(message.SerializeToString())
    assert before == dataclasses.replace(known, wire=UNNAMED, release="")
    assert WireVersions.from_pb(common_pb2.WireVersions()) == WireVersions.parse(None) == UNNAMED


class Host(kvtransfer_pb2_grpc.KVTransferServicer):
    async def Ledger(self, request, context):  # type: ignore[no-untyped-def]
        async with mapped_errors(context):
            return kvtransfer_pb2.LedgerReply(total=7)


@pytest.mark.parametrize("caller", [WireVersions(1, 1), WireVersions(2, 4)])
async def test_a_server_refuses_callers_that_it_does_not_understand(caller: WireVersions) -> None:
    server = RpcServer("127.0.0.1", 0, Credentials(), "host", wire=WireVersions(2, 3))
    kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(Host(), server.server)
    async with open_channel(f"127.0.0.1:{await server.start()}", Credentials(), caller) as channel:
        await server.set_ready(True)
        assert await is_serving(channel, "host")  # orchestrators check health, too, and speak no version
        call = kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger(kvtransfer_pb2.LedgerRequest(), timeout=10)
        if caller.newest >= 2:
            assert (await call).total == 7
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = unmapped_error(caught.value, "kvtransfer at host")
            assert isinstance(error, RefusedError)
            assert "update the caller" in str(error)
    await server.close(0)


def test_this_release_understands_the_one_before() -> None:
    assert OURS.overlaps(UNNAMED)
