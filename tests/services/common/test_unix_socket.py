"""Messages over a stream of bytes: how they are framed, the size limit, and the end of the connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.unix_socket import MAX_MESSAGE_BYTES, Framed
from paceline.services.worker.batch_sender import HostConnection


class End:
    """One end of a connection. The other end is a bare socket."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.lost = asyncio.Event()
        self.framed = Framed(self.messages.append, self.lost.set)
        self.ours, self.other = socket.socketpair()

    async def has(self, count: int) -> list[bytes]:
        async with asyncio.timeout(10):
            while len(self.messages) < count:
                await asyncio.sleep(0.001)
        return self.messages


@pytest.fixture
async def end() -> AsyncIterator[End]:
    one = End()
    await asyncio.get_running_loop().connect_accepted_socket(lambda: one.framed, one.ours)
    yield one
    one.framed.abort()
    one.other.close()


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


async def test_messages_may_come_in_pieces_and_several_at_once(end: End) -> None:
    data = framed(b"one") + framed(b"") + framed(b"three")
    for start in range(0, 9, 3):
        end.other.sendall(data[start : start + 3])
        await asyncio.sleep(0.01)
    end.other.sendall(data[9:])
    assert await end.has(3) == [b"one", b"", b"three"]


async def test_a_length_that_no_message_has_ends_the_connection(end: End) -> None:
    end.other.sendall(framed(b"fine") + (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big") + framed(b"never read"))
    async with asyncio.timeout(10):
        await end.lost.wait()
    assert end.messages == [b"fine"]
    assert not end.framed.is_open


async def test_nothing_is_sent_when_it_is_over(end: End) -> None:
    end.framed.send(pb.BatchReply(id=7))
    assert end.other.recv(100) == framed(pb.BatchReply(id=7).SerializeToString())
    end.other.close()
    async with asyncio.timeout(10):
        await end.lost.wait()
    end.framed.send(pb.BatchReply(id=8))


async def test_each_reply_finds_who_waits_for_it_and_the_end_finds_all(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        connection = await HostConnection.connect(str(tmp_path / "s"))
        other, _ = listener.accept()
    requests = [pb.BatchRequest(session=session) for session in (1, 2, 3)]
    calls = [asyncio.create_task(connection.call(request)) for request in requests]
    await asyncio.sleep(0.01)
    assert [request.id for request in requests] == [1, 2, 3]
    calls[0].cancel()
    for number in (9, 1, 3):  # an unknown id, the id of a cancelled call, and the last call's id
        other.sendall(framed(pb.BatchReply(id=number).SerializeToString()))
    assert (await calls[2]).id == 3
    other.close()
    for call in (calls[1], connection.call(pb.BatchRequest())):
        with pytest.raises(UnavailableError, match="has ended"):
            await call
    assert not connection.is_open
