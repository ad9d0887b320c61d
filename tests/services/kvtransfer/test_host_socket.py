"""The socket of a host: who can reach it, what ends a connection, and what a connection leaves behind."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, PacelineError, UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.unix_socket import remove_stale_sockets
from paceline.services.kvtransfer.host_socket import HostSocket, Reply
from paceline.services.worker.batch_sender import HostConnection

REFUSED, BROKEN, SLOW, BIG = 1, 2, 3, 4
"""Sessions with special answers from `Served`."""


class Served(HostSocket):
    """A socket that answers with an empty reply, or as the number of the session says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._take)
        self.taken = 0
        self.slow: list[Reply] = []

    def _take(self, request: pb.BatchRequest, reply: Reply) -> None:
        self.taken += 1
        if request.session == REFUSED:
            raise PacelineError("no such session")
        if request.session == BROKEN:
            raise RuntimeError("a bug")
        if request.session == SLOW:
            self.slow.append(reply)
        else:
            reply(pb.BatchReply(results=[pb.Result(message="x" * 60_000)] if request.session == BIG else []))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    one = Served(tmp_path)
    await one.start()
    yield one
    await one.close()
    assert files(tmp_path) == set()


def files(folder: Path) -> set[Path]:
    return {*folder.iterdir()}


def raw(served: Served) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(served.path))
    connection.setblocking(False)
    return connection


async def test_only_this_user_reaches_it(served: Served) -> None:
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "message",
    [
        pb.BatchRequest(session=REFUSED).SerializeToString(),
        pb.BatchRequest(session=BROKEN).SerializeToString(),
        b"\xff",
    ],
    ids=["refused", "a bug", "no message"],
)
async def test_what_cannot_be_taken_ends_its_connection_and_no_other(served: Served, message: bytes) -> None:
    other = await HostConnection.connect(str(served.path))
    with raw(served) as connection:
        connection.sendall(len(message).to_bytes(4, "big") + message)
        async with asyncio.timeout(10):
            assert await asyncio.get_running_loop().sock_recv(connection, 100) == b""
    assert not (await other.call(pb.BatchRequest())).results
    other.close()


async def test_a_slow_request_delays_no_other_and_can_be_answered_while_its_connection_lasts(served: Served) -> None:
    connection = await HostConnection.connect(str(served.path))
    slow = [asyncio.create_task(connection.call(pb.BatchRequest(session=SLOW))) for _ in range(2)]
    await connection.call(pb.BatchRequest())
    served.slow[0](pb.BatchReply(results=[pb.Result(message="late")]))
    assert (await slow[0]).results[0].message == "late"
    assert served.slow[1].can_be_sent()
    connection.close()
    async with asyncio.timeout(10):
        while served.slow[1].can_be_sent():
            await asyncio.sleep(0.001)
        with pytest.raises(UnavailableError):
            await slow[1]
    served.slow[1](pb.BatchReply())


async def test_who_asks_much_at_once_holds_nobody_up(served: Served) -> None:
    request, count = pb.BatchRequest(session=9).SerializeToString(), 1000
    request = len(request).to_bytes(4, "big") + request
    other = await HostConnection.connect(str(served.path))
    with raw(served) as connection:
        connection.sendall(request)  # so that the host has accepted this connection when the other one sends
        await asyncio.get_running_loop().sock_recv(connection, 100)
        connection.sendall(request * count)
        await other.call(pb.BatchRequest())
        assert served.taken < count
    other.close()


async def test_who_takes_no_replies_is_not_served_any_more(served: Served) -> None:
    request, count = pb.BatchRequest(session=BIG).SerializeToString(), 1000
    with raw(served) as connection:
        connection.sendall((len(request).to_bytes(4, "big") + request) * count)
        await asyncio.sleep(0.2)
        assert 0 < served.taken < 50
        async with asyncio.timeout(10):
            while served.taken < count:  # and continues when the client reads the replies
                await asyncio.get_running_loop().sock_recv(connection, 1 << 20)


async def test_what_a_killed_service_left_is_removed_and_nothing_else(served: Served, tmp_path: Path) -> None:
    prefix = f"paceline-{os.getuid()}-"
    left, others = tmp_path / f"{prefix}left.sock", [tmp_path / f"{prefix}file.sock", tmp_path / "other.sock"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
    others[0].touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(others[1]))
    remove_stale_sockets(tmp_path)
    assert files(tmp_path) == {served.path, *others}
    for other in others:
        other.unlink()


async def test_a_folder_that_is_not_there_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--arena-dir"):
        await HostSocket(tmp_path / "absent", lambda request, reply: None).start()


async def test_a_folder_may_have_a_long_name(tmp_path: Path) -> None:
    (folder := tmp_path / ("x" * 200)).mkdir()
    one = Served(folder)
    await one.start()
    connection = await HostConnection.connect(str(one.path))
    assert not (await connection.call(pb.BatchRequest())).results
    connection.close()
    await one.close()
