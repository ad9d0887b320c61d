"""Operations on their way to kvtransfer: their order, the size of batches, and missing answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from paceline.core.errors import UnavailableError
from paceline.proto import common_pb2
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.worker import batch_sender
from paceline.services.worker.batch_sender import MAX_BATCH_BYTES, MAX_OPERATIONS, BatchSender

pytestmark = pytest.mark.slow


class Line:
    """A service that records batches, and answers each operation with its request id as the message."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.broken = 0
        """Number of calls to refuse."""
        self.missing = 0
        """Number of results that each reply leaves out."""

    async def __call__(self, operations: Sequence[pb.Operation]) -> pb.BatchReply:
        self.batches.append([name(operation) for operation in operations])
        await asyncio.sleep(0)
        if self.broken:
            self.broken -= 1
            raise UnavailableError("the line broke")
        results = [pb.Result(message=name(operation)) for operation in operations]
        return pb.BatchReply(results=results[self.missing :])


@pytest.fixture
def line() -> Line:
    return Line()


@contextlib.asynccontextmanager
async def sending(line: Line) -> AsyncIterator[BatchSender]:
    """Run a sender, which starts at the first `await` of the block. Operations submitted before it wait together."""
    sender = BatchSender(line)
    task = asyncio.create_task(sender.run())
    yield sender
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def key(request: str) -> common_pb2.Key:
    return common_pb2.Key(request_id=request, attempt=1, generation=1)


def trim(request: str) -> pb.Operation:
    return pb.Operation(trim=pb.Trim(key=key(request)))


def release(request: str) -> pb.Operation:
    return pb.Operation(release=pb.Release(key=key(request)))


def seal(request: str, size: int) -> pb.Operation:
    """Return an operation of about `size` bytes."""
    return pb.Operation(seal=pb.Seal(key=key(request), hashes=[bytes(size)]))


def name(operation: pb.Operation) -> str:
    return str(getattr(operation, operation.WhichOneof("op") or "").key.request_id)


async def test_each_gets_its_own_result(line: Line) -> None:
    async with sending(line) as sender:
        results = await asyncio.gather(*(sender.submit(trim(each)) for each in "abc"))
        assert [result.message for result in results] == ["a", "b", "c"]
        assert line.batches == [["a", "b", "c"]]


async def test_what_comes_while_a_batch_is_under_way_makes_the_next(line: Line) -> None:
    async with sending(line) as sender:
        first = sender.submit(trim("a"))
        while not line.batches:
            await asyncio.sleep(0)
        later = [sender.submit(trim(each)) for each in "bc"]
        await asyncio.gather(first, *later)
        assert line.batches == [["a"], ["b", "c"]]


async def test_a_batch_has_at_most_so_many_operations(line: Line) -> None:
    async with sending(line) as sender:
        await asyncio.gather(*(sender.submit(trim(str(number))) for number in range(MAX_OPERATIONS + 1)))
        assert [len(batch) for batch in line.batches] == [MAX_OPERATIONS, 1]


async def test_a_batch_has_at_most_so_many_bytes_unless_one_operation_has_more(line: Line) -> None:
    sizes = {"small": 10, "half": MAX_BATCH_BYTES // 2, "other half": MAX_BATCH_BYTES // 2, "huge": MAX_BATCH_BYTES * 2}
    async with sending(line) as sender:
        await asyncio.gather(*(sender.submit(seal(name, size)) for name, size in sizes.items()))
        assert line.batches == [["small", "half"], ["other half"], ["huge"]]


async def test_releases_without_an_answer_are_sent_again_in_their_place(line: Line) -> None:
    line.broken = 2
    async with sending(line) as sender:
        waiting = [sender.submit(each) for each in (release("a"), trim("b"), release("c"))]
        while not line.batches:
            await asyncio.sleep(0)
        waiting.append(sender.submit(trim("d")))
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert line.batches == [["a", "b", "c"], ["a", "c", "d"], ["a", "c"]]
        assert [isinstance(outcome, UnavailableError) for outcome in outcomes] == [False, True, False, True]


async def test_a_reply_that_lacks_results_ends_the_sender(line: Line) -> None:
    line.missing = 1
    sender = BatchSender(line)
    waiting = [sender.submit(trim(each)) for each in "ab"]
    with pytest.raises(ValueError, match="shorter"):
        await sender.run()
    sender.close()
    assert isinstance(waiting[1].exception(), UnavailableError)


async def test_closing_fails_what_waits_and_what_comes(line: Line) -> None:
    sender = BatchSender(line)
    waiting = sender.submit(trim("a"))
    sender.close()
    for future in (waiting, sender.submit(trim("b"))):
        with pytest.raises(UnavailableError, match="no session"):
            await future


async def test_in_a_pause_nothing_is_sent_and_what_has_no_answer_comes_first_behind_it(line: Line) -> None:
    async with sending(line) as sender:
        first = sender.submit(trim("a"))
        while not line.batches:
            await asyncio.sleep(0)
        sender.pause()  # the answer to "a" is on its way
        second = sender.submit(trim("b"))
        await asyncio.sleep(0.05)
        assert line.batches == [["a"]]
        assert not first.done()
        sender.resume()
        await asyncio.gather(first, second)
        assert line.batches == [["a"], ["a", "b"]]


async def test_what_fails_because_of_a_pause_that_is_known_a_little_later_is_sent_again(line: Line) -> None:
    line.broken = 1
    async with sending(line) as sender:
        waiting = sender.submit(trim("a"))
        while not line.batches:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        sender.pause()
        sender.resume()
        assert (await waiting).message == "a"
        sender.pause()  # while the sender waits for work
        late = sender.submit(trim("b"))
        await asyncio.sleep(0.05)
        assert line.batches == [["a"], ["a"]]
        sender.resume()
        await late


async def test_what_may_linger_goes_before_what_may_not_and_with_it(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sender, "LINGER_SECONDS", 60.0)
    async with sending(line) as sender:
        await sender.submit(release("a"))
        waiting = [sender.submit(trim(request), may_linger=True) for request in ("b", "c")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert line.batches == [["a"]]
        await sender.submit(release("d"))
        assert line.batches == [["a"], ["b", "c", "d"]]
        assert [future.result().message for future in waiting] == ["b", "c"]


async def test_what_may_linger_goes_by_itself_after_a_while_each_time(line: Line) -> None:
    async with sending(line) as sender, asyncio.timeout(10):
        await sender.submit(trim("a"), may_linger=True)
        both = [sender.submit(trim(request), may_linger=True) for request in ("b", "c")]
        await asyncio.gather(*both)
        await sender.submit(release("d"))
        await sender.submit(trim("e"), may_linger=True)
        assert line.batches == [["a"], ["b", "c"], ["d"], ["e"]]
