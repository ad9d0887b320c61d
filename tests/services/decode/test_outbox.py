"""The events that a decode worker sends to one gateway."""

from __future__ import annotations

import asyncio
from itertools import groupby
from operator import itemgetter

import pytest

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.core.types import Logprob, Token
from paceline.proto import worker_pb2
from paceline.services.common.tasks import end_tasks
from paceline.services.decode.outbox import MAX_TOKENS, Outbox, Outboxes


class Gateway:
    """A gateway that reads one stream, and takes a message only when the test says so."""

    def __init__(self, outboxes: Outboxes) -> None:
        self.messages: list[list[tuple[int, list[int]]]] = []
        self.under_way = 0
        self._turn = asyncio.Semaphore(1)
        self.stream = asyncio.create_task(outboxes.serve("stream", self._take))

    async def _take(self, message: worker_pb2.DecodeEvents) -> None:
        self.under_way += 1
        await self._turn.acquire()
        self.under_way -= 1
        plain = groupby(zip(message.attempts, message.token_ids), key=itemgetter(0))
        tokens = [(attempt, [token_id for _, token_id in own]) for attempt, own in plain]
        events = [(each.attempt, [token.id for token in each.tokens.tokens]) for each in message.events]
        self.messages.append(tokens + events)

    def read(self, count: int) -> None:
        for _ in range(count):
            self._turn.release()


async def open_stream() -> tuple[Gateway, Outbox]:
    outboxes = Outboxes()
    gateway = Gateway(outboxes)
    while not gateway.messages:
        await asyncio.sleep(0)
    assert gateway.messages == [[]]  # the first message is empty and says that the stream is known
    return gateway, outboxes.of(worker_pb2.Recipient(stream="stream"))


def put(outbox: Outbox, attempt: int, token_id: int, logprobs: tuple[Logprob, ...] = ()) -> None:
    outbox.token(attempt, Token(token_id, logprobs))


async def test_what_comes_together_travels_together_and_nothing_is_lost_or_doubled() -> None:
    gateway, outbox = await open_stream()
    for attempt, token_id in ((1, 10), (1, 11), (2, 20), (1, 12)):
        put(outbox, attempt, token_id)
    while not gateway.under_way:
        await asyncio.sleep(0)
    put(outbox, 1, 13)
    flushing = asyncio.create_task(outbox.flush())
    await asyncio.sleep(0)
    put(outbox, 1, 14)  # the flush does not wait for later events
    gateway.read(1)
    while len(gateway.messages) < 2:
        await asyncio.sleep(0)
    assert not flushing.done()
    gateway.read(1)
    await flushing
    assert gateway.messages[1:] == [[(1, [10, 11]), (2, [20]), (1, [12])], [(1, [13])]]
    gateway.read(1)
    await outbox.flush()
    assert gateway.messages[3:] == [[(1, [14])]]
    await end_tasks(gateway.stream)


async def test_tokens_of_which_more_is_told_have_events() -> None:
    gateway, outbox = await open_stream()
    gateway.read(9)
    report = (Logprob(7, -1.0, 1),)
    for attempt, token_id, logprobs in ((2, 20, report), (1, 10, ()), (2, 21, report)):
        put(outbox, attempt, token_id, logprobs)
    await outbox.flush()
    assert gateway.messages[1:] == [[(1, [10]), (2, [20, 21])]]
    await end_tasks(gateway.stream)


async def test_messages_stay_small_where_a_gateway_reads_slowly() -> None:
    gateway, outbox = await open_stream()
    for number in range(3 * MAX_TOKENS):
        put(outbox, 1, number)
    gateway.read(4)
    await outbox.flush()
    ids = [[token_id for _, own in message for token_id in own] for message in gateway.messages[1:]]
    assert max(map(len, ids)) <= MAX_TOKENS + 1
    assert [token_id for own in ids for token_id in own] == list(range(3 * MAX_TOKENS))
    await end_tasks(gateway.stream)


async def test_a_failed_attempt_says_so_behind_its_tokens() -> None:
    gateway, outbox = await open_stream()
    gateway.read(9)

    async def fail() -> None:
        async with outbox.member(1, print):
            put(outbox, 1, 10)
            raise PacelineError("it failed")

    with pytest.raises(PacelineError):
        await fail()
    assert [event for message in gateway.messages for event in message] == [(1, [10]), (1, [])]
    await end_tasks(gateway.stream)


async def test_with_the_stream_its_attempts_end() -> None:
    gateway, outbox = await open_stream()
    errors: list[UnavailableError] = []
    async with outbox.member(1, errors.append):
        put(outbox, 1, 10)
        await end_tasks(gateway.stream)
        put(outbox, 1, 11)  # dropped, and takes no memory
        assert not outbox.is_writing
    assert len(errors) == 1


async def test_names_and_numbers_are_of_one() -> None:
    outboxes = Outboxes()
    gateway = Gateway(outboxes)
    await asyncio.sleep(0)
    for name in ("", "stream", "x" * 200):
        with pytest.raises(InvalidRequestError):
            await outboxes.serve(name, gateway._take)
    with pytest.raises(UnavailableError):
        outboxes.of(worker_pb2.Recipient(stream="another"))
    outbox = outboxes.of(worker_pb2.Recipient(stream="stream"))
    gateway.read(9)
    async with outbox.member(7, print):
        with pytest.raises(InvalidRequestError):
            await outbox.member(7, print).__aenter__()
    await end_tasks(gateway.stream)
