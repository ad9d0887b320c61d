"""A client that comes back at another gateway gets exactly the events that it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import FinishReason, Token
from paceline.services.gateway.answers.parts import CallArguments, CallBegin, Content, Part, Reasoning, join_parts
from paceline.services.gateway.attempt import Ended, Event, Generated
from paceline.services.gateway.choice import Delta
from paceline.services.gateway.errors import ApiError
from paceline.services.gateway.generation import Generation
from paceline.services.gateway.messages_api.answer import MessageFormat, MessageWriter
from paceline.services.gateway.resume import Gathering, Position, StreamIds, read_positions
from paceline.services.gateway.streaming import event_stream
from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.messages_api.test_answer import USAGE
from tests.services.gateway.toy_workers import TEXT

PIECES: list[list[Part]] = [
    [],
    [Content("c")],
    [Reasoning("r")],
    [Reasoning("r"), Content("c")],
    [Content("c"), CallBegin(0, "id", "f"), CallArguments(0, "{")],
    [CallBegin(0, "id", "f"), CallArguments(0, "{}"), Content("c"), Reasoning("r")],
]
"""Parts that one token may add to an answer."""
ANSWERS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8)
ENDS = st.sets(st.integers(1, 7))
"""After which tokens of an answer its messages end."""


def deltas_of(answer: list[list[Part]], ends: set[int]) -> list[Delta]:
    """Return the deltas of an answer, whose tokens came in messages that end after these tokens."""
    places = sorted({end for end in ends if end < len(answer)} | {0, len(answer)})
    deltas = []
    for start, end in itertools.pairwise(places):
        parts = join_parts([part for token in answer[start:end] for part in token])
        text = "".join(part.text for part in parts if isinstance(part, Content))
        deltas.append(Delta(0, text, parts, tokens=[Token(0)] * (end - start)))
    return [*deltas, Delta(0, finish_reason="stop")]


class Recorded:
    """A generation whose deltas are known."""

    def __init__(self, deltas: list[Delta]) -> None:
        self._batches = [[delta] for delta in deltas]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def batch(self) -> list[Delta]:
        return self._batches.pop(0) if self._batches else []


def stream(deltas: list[Delta], last_event_id: str | None) -> list[tuple[str, Any]]:
    """Return the events of a message, each with its id and its data."""
    ids = StreamIds(None if last_event_id is None else read_positions(last_event_id, 1), 1)
    writer = MessageWriter(MessageFormat("msg_1", "toy"), lambda: USAGE)

    async def read() -> bytes:
        generation = cast(Generation, Recorded(deltas))
        return b"".join([data async for data in event_stream(generation, writer, ids)])

    events = []
    for text in asyncio.run(read()).decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        events.append((fields.get("id", ""), json.loads(fields["data"])))
    return events


def seen(events: list[tuple[str, Any]]) -> list[Any]:
    """Return what a client makes of events: neighbouring deltas of a block are joined, and pings mean nothing."""
    joined: list[Any] = []
    for _, data in events:
        if data["type"] == "ping":
            continue
        if data["type"] == "content_block_delta" and joined and joined[-1]["type"] == "content_block_delta":
            before = joined.pop()
            merged = {key: before["delta"].get(key, "") + value for key, value in data["delta"].items()}
            data = {**data, "delta": {**merged, "type": data["delta"]["type"]}}
        joined.append(data)
    return joined


@given(ANSWERS, ENDS, ENDS, st.data())
def test_a_message_goes_on_with_the_next_event(
    answer: list[list[Part]], ends: set[int], other_ends: set[int], data: st.DataObject
) -> None:
    whole = stream(deltas_of(answer, ends), None)
    named = [place for place, (event_id, _) in enumerate(whole) if event_id]
    last = data.draw(st.sampled_from(named))
    (position,) = read_positions(whole[last][0], 1)
    # The gateway gathers the client's tokens into one message; see `Gathering`.
    other_ends = {end for end in other_ends if end > position.tokens} | {position.tokens}
    again = stream(deltas_of(answer, other_ends), whole[last][0])
    assert seen(whole[: last + 1] + again) == seen(whole)


@given(st.lists(st.integers(1, 4), max_size=6), st.integers(1, 12))
def test_the_tokens_that_a_client_has_come_together(sizes: list[int], count: int) -> None:
    taken: list[Event] = []
    gathering = Gathering(count, taken.append)
    numbers = itertools.count()
    for size in sizes:
        gathering(Generated([Token(next(numbers)) for _ in range(size)]))
    gathering(Ended(FinishReason.STOP))
    total = sum(sizes)
    assert taken[-1] == Ended(FinishReason.STOP)
    tokens = [[token.id for token in event.tokens] for event in taken if isinstance(event, Generated)]
    assert [*itertools.chain(*tokens)] == list(range(total))
    assert len(tokens[0]) == min(count, total)


@pytest.mark.parametrize("position", [Position(), Position(7), Position(7, True), Position(12, False, 3)])
def test_an_id_names_a_position_in_each_choice(position: Position) -> None:
    assert read_positions(f"4,{position}", 2) == [Position(4), position]


@pytest.mark.parametrize("text", ["", "x", "-1", "1,2", "1-", "f", "9" * 10])
def test_an_id_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Last-Event-ID must be"):
        read_positions(text, 1)


def test_an_id_keeps_what_the_client_has_of_other_choices() -> None:
    """The client may come back again before the second choice's tokens have been gathered."""
    ids = StreamIds(read_positions("5,7f", 2), 2)
    event = b"data: x\n\n"
    assert ids.mark(Delta(0, tokens=[Token(0)] * 5), event) == b""
    assert ids.mark(Delta(0, tokens=[Token(0)]), event) == b"id: 6,7f\n" + event
    assert ids.mark(Delta(1, tokens=[Token(0)] * 7), event) == b""
    assert ids.mark(Delta(1, finish_reason="stop"), event) == b""
    assert ids.mark(Delta(0, finish_reason="stop"), event) == b"id: 6f,7f\n" + event


def test_an_id_past_the_end_of_the_answer_is_refused() -> None:
    ids = StreamIds(read_positions("9", 1), 1)
    assert ids.mark(Delta(0, tokens=[Token(0)] * 5), b"data: x\n\n") == b""
    with pytest.raises(ApiError, match="more tokens than the answer has"):
        ids.mark(Delta(0, finish_reason="stop"), b"data: x\n\n")


# ---- the whole way, with two gateways


async def read(stack: Stack, last: str = "", **body: Any) -> tuple[dict[int, str], list[str]]:
    """Return the text of each choice and the ids of the events of a stream that may go on after an event."""
    headers = {"X-Request-Id": "mine"} | ({"Last-Event-ID": last} if last else {})
    fields = {"prompt": "x", "max_tokens": 30, "stream": True, **body}
    response = await stack.http.post("/v1/completions", json=fields, headers=headers)
    assert response.status_code == 200, response.text
    texts, ids = dict[int, str](), list[str]()
    for event in response.text.split("\n\n")[:-2]:
        name, _, data = event.partition("\ndata: ")
        choice = json.loads(data)["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        ids.append(name.removeprefix("id: "))
    return texts, ids


async def test_a_stream_goes_on_at_another_gateway(start_stack: StartStack) -> None:
    """Without a seed, so that both gateways have to derive the same one."""
    one = await start_stack()
    other = await one.another_gateway()
    for worker in one.workers.values():
        worker.script = b"abcdefghijklmnopqrstuvwxyz"
    text = (await read(one))[0][0]
    assert len(text.encode()) == 30
    assert (await read(other))[0][0] == text
    assert (await read(other, "12"))[0][0] == text[12:]
    assert (await read(other, "30f"))[0] == {}
    await other.post("/v1/completions", prompt="x", max_tokens=30)  # with an id of its own
    seeds = [call.work.sampling.seed for call in one.workers["prefill-0"].calls]
    assert seeds[-1] != seeds[0]


async def test_each_choice_goes_on_where_it_was(start_stack: StartStack) -> None:
    stack = await start_stack()
    texts, ids = await read(stack, n=2, seed=0)
    assert texts == {0: TEXT[:30], 1: TEXT[1:31]}
    assert ids[-1] == "30f,30f"
    assert (await read(stack, "30f,12", n=2, seed=0))[0] == {1: TEXT[13:31]}
    assert (await read(stack, "3,12", n=2, seed=0))[0] == {0: TEXT[3:30], 1: TEXT[13:31]}


async def test_events_have_ids_only_if_the_client_can_come_back(stack: Stack) -> None:
    plain = await stack.post("/v1/completions", prompt="x", stream=True)
    assert "id: " not in plain.text.replace('"id": ', "")
    responses = "/v1/responses", {"input": "x"}, {"Last-Event-ID": "3", "X-Request-Id": "mine"}
    for path, body, headers in (("/v1/completions", {"prompt": "x"}, {"Last-Event-ID": "3"}), responses):
        refused = await stack.http.post(path, json={"stream": True, **body}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")
