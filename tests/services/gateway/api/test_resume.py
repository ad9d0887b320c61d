"""A client that comes back at another gateway gets exactly the events that it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import FinishReason, Token
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.generation import Generation
from paceline.services.gateway.api.messages.answer import MessageFormat, MessageWriter
from paceline.services.gateway.api.respond import event_stream
from paceline.services.gateway.api.resume import (
    EventId,
    Gathering,
    Origin,
    Position,
    StreamIds,
    answer_digest,
    read_event_id,
)
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.answers.answer import (
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    join_parts,
)
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.plan import ServedModel
from paceline.services.gateway.planning.planning import plan_chat
from paceline.services.gateway.planning.schemas import ChatRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.sequences.progress import Ended, Event, Generated
from tests.services.gateway.api.messages.test_answer import USAGE
from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_model import write_toy_model
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
ORIGIN = Origin(b"twelve bytes", 2**64 - 1, 1_790_000_000)


def deltas_of(answer: list[list[Part]], ends: set[int]) -> list[Delta]:
    """Return the deltas of an answer, whose tokens came in messages that end after these tokens."""
    places = sorted({end for end in ends if end < len(answer)} | {0, len(answer)})
    deltas = []
    for start, end in itertools.pairwise(places):
        parts = join_parts([part for token in answer[start:end] for part in token])
        text = "".join(part.text for part in parts if isinstance(part, Content))
        deltas.append(Delta(0, text, parts, tokens=[*map(Token, range(start, end))]))
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
    ids = StreamIds(ORIGIN, None if last_event_id is None else read_event_id(last_event_id), 1)
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
    (position,) = read_event_id(whole[last][0]).positions
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


POSITIONS = st.builds(
    Position, st.integers(0, 10**9 - 1), st.booleans(), st.integers(0, 2**32 - 1), st.integers(0, 9999)
)
ORIGINS = st.builds(Origin, st.binary(min_size=12, max_size=12), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))


@given(ORIGINS, st.lists(POSITIONS, min_size=1, max_size=4))
def test_an_id_names_its_origin_and_a_position_in_each_choice(origin: Origin, positions: list[Position]) -> None:
    text = f"{origin}:{','.join(map(str, positions))}"
    assert text.isascii()
    assert text.isprintable()
    assert read_event_id(text) == EventId(origin, positions)
    assert origin.time.year >= 1970


WRONG = ["x", "-1", "17", f"{ORIGIN}", f"{ORIGIN}:", f"{ORIGIN}:1", f"{ORIGIN}:f.00000000", f"{ORIGIN}:1.0000000g"]
WRONG += [f"{ORIGIN}:1.00000000,", f"{ORIGIN}:{'9' * 10}.00000000", f"x{ORIGIN}:1.00000000", f"{ORIGIN}:1.00000000-"]


@pytest.mark.parametrize("text", WRONG)
def test_an_id_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Last-Event-ID must be") as caught:
        read_event_id(text)
    assert caught.value.status == 400


EVENT = b"data: x\n\n"


def some(*token_ids: int) -> list[Token]:
    return [Token(token_id) for token_id in token_ids]


def positions_after(deltas: list[Delta], choices: int = 1) -> list[Position]:
    """Return the position in each choice after deltas, each of which is one event."""
    ids, last = StreamIds(ORIGIN, None, choices), b""
    for delta in deltas:
        last = ids.mark(delta, EVENT) or last
    return read_event_id(last.decode().removeprefix("id: ").partition("\n")[0]).positions


def test_nothing_is_sent_before_all_that_the_client_has_is_checked() -> None:
    """And the client may come back again before the second choice's tokens have been gathered."""
    had = [Delta(0, tokens=some(*range(5))), Delta(1, tokens=some(*range(7))), Delta(1, finish_reason="stop")]
    received = positions_after(had, 2)
    assert [each[:2] for each in received] == [(5, False), (7, True)]
    ids = StreamIds(ORIGIN, EventId(ORIGIN, received), 2)
    sixth = Delta(0, tokens=some(5))
    assert [ids.mark(delta, EVENT) for delta in (had[0], sixth, had[1])] == [b"", b"", b""]
    sent = ids.mark(had[2], EVENT)
    assert sent.count(EVENT) == 1
    (after_sixth, finished) = read_event_id(sent.decode().removeprefix("id: ").partition("\n")[0]).positions
    assert [after_sixth] == positions_after([had[0], sixth])
    assert finished == received[1]
    assert ids.mark(Delta(0, finish_reason="stop"), EVENT).count(EVENT) == 1


def test_an_id_counts_no_tokens_whose_events_wait_for_the_end_of_their_choice() -> None:
    """Otherwise the client would get all of this choice again, if the event of another choice was its last one."""
    ids = StreamIds(ORIGIN, None, 2)
    ids.mark(Delta(0, tokens=some(1, 2)), EVENT)
    ids.mark(Delta(0, tokens=some(3)), b"")
    other = ids.mark(Delta(1, tokens=some(4)), EVENT).decode()
    received = read_event_id(other.removeprefix("id: ").partition("\n")[0])
    assert [each[:2] for each in received.positions] == [(2, False), (1, False)]
    ids = StreamIds(ORIGIN, received, 2)
    again = [(Delta(1, tokens=some(4)), EVENT), (Delta(0, tokens=some(1, 2)), EVENT), (Delta(0, tokens=some(3)), b"")]
    assert [ids.mark(*each) for each in again] == [b"", b"", b""]
    assert ids.mark(Delta(0, finish_reason="stop"), EVENT).count(EVENT) == 1


@pytest.mark.parametrize(
    ("had", "again"),
    [
        ([Delta(0, tokens=some(1, 2))], [Delta(0, tokens=some(1, 3))]),
        ([Delta(0, tokens=some(1, 2))], [Delta(0, tokens=some(1, 2), finish_reason="stop")]),
        ([Delta(0, tokens=some(1, 2, 3))], [Delta(0, tokens=some(1, 2)), Delta(0, finish_reason="stop")]),
        (
            [Delta(0, tokens=some(1)), Delta(0, finish_reason="stop")],
            [Delta(0, tokens=some(1)), Delta(0, tokens=some(2))],
        ),
    ],
    ids=["another token", "an earlier end", "fewer tokens", "a later end"],
)
def test_two_answers_are_not_joined(had: list[Delta], again: list[Delta]) -> None:
    ids = StreamIds(ORIGIN, EventId(ORIGIN, positions_after(had)), 1)
    *earlier, last = again
    assert [ids.mark(delta, EVENT) for delta in earlier] == [b""] * len(earlier)
    with pytest.raises(ApiError, match="is not generated again") as caught:
        ids.mark(last, EVENT)
    assert caught.value.status == 409


# ---- what an answer depends on

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


def digest_of(tokenizer: Tokenizer, fields: dict[str, Any], owner: str = "", now: datetime | None = None) -> bytes:
    body = ChatRequest.model_validate({"messages": MESSAGES, "stream": True, **fields})
    plan = plan_chat(body, ServedModel(tokenizer, 512, choose_forms("hermes", "none", "", frozenset()), now=now))
    return answer_digest(dataclasses.replace(plan, owner=owner), body)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "ho"}]},
        {"temperature": 0.5},
        {"max_tokens": 5},
        {"stop": "x"},
        {"n": 2},
        {"seed": 1},
        {"logprobs": True},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"97": 1.0}},
        {"chat_template_kwargs": {"a": 1}},
        {"return_token_ids": True},
        {"cache_salt": "x"},
    ],
    ids=repr,
)
def test_an_answer_depends_on_its_whole_body(toy_tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    own = digest_of(toy_tokenizer, fields)
    assert own == digest_of(toy_tokenizer, json.loads(json.dumps(fields)))
    assert own != digest_of(toy_tokenizer, {})
    assert own != digest_of(toy_tokenizer, fields, owner="other")


def test_an_answer_depends_on_the_rendered_prompt(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_toy_model(tmp_path, chat_template="{{ strftime_now('%d %b') }}"))
    late, soon, next_day = (datetime(2026, 11, day, hour) for day, hour in ((28, 23), (28, 22), (29, 0)))
    assert digest_of(tokenizer, {}, now=late) == digest_of(tokenizer, {}, now=soon)
    assert digest_of(tokenizer, {}, now=late) != digest_of(tokenizer, {}, now=next_day)


def test_an_answer_does_not_depend_on_the_order_of_fields_or_on_the_longest_context_of_the_workers(
    toy_tokenizer: Tokenizer,
) -> None:
    digests = set()
    for bias, longest in (({"97": 1.0, "98": 2.0}, 512), ({"98": 2.0, "97": 1.0}, 256)):
        body = ChatRequest.model_validate({"messages": MESSAGES, "logit_bias": bias, "stream": True})
        digests.add(answer_digest(plan_chat(body, ServedModel(toy_tokenizer, longest)), body))
    assert len(digests) == 1


# ---- the whole way, with two gateways


async def ask(stack: Stack, last: str | None, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    asking = {"X-Event-IDs": "true"} if last is None else {"Last-Event-ID": last}
    fields = {"prompt": "x", "max_tokens": 30, "stream": True, **body}
    return await stack.http.post("/v1/completions", json=fields, headers=asking | headers)


async def read(stack: Stack, last: str | None = None, **body: Any) -> tuple[dict[int, str], list[str]]:
    """Return the text of each choice and the ids of the events of a stream that may go on after an event."""
    response = await ask(stack, last, body, {})
    assert response.status_code == 200, response.text
    texts, ids = dict[int, str](), list[str]()
    for event in response.text.split("\n\n")[:-2]:
        name, _, data = event.partition("\ndata: ")
        choice = json.loads(data)["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        ids.append(name.removeprefix("id: "))
    return texts, ids


async def test_a_stream_goes_on_at_another_gateway(start_stack: StartStack) -> None:
    """Without a seed and without an id of the request, so the ids of the events alone say what the answer is."""
    one = await start_stack()
    other = await one.another_gateway()
    whole, ids = await read(one)
    for place, last in enumerate(ids):
        rest, later = await read(other, last)
        had = 0 if place + 1 == len(ids) else len(whole[0]) - len(rest.get(0, ""))
        assert whole[0][had:] == rest.get(0, whole[0])
        assert later == ids[place + 1 :]
    seeds = {call.work.sampling.seed for call in one.workers["prefill-0"].calls}
    assert len(seeds) == 1


async def test_each_choice_goes_on_where_it_was(stack: Stack) -> None:
    texts, ids = await read(stack, n=2)
    for place in (0, len(ids) // 2, len(ids) - 2):
        rest, later = await read(stack, ids[place], n=2)
        assert later[-1] == ids[-1]
        for choice, text in rest.items():
            assert texts[choice].endswith(text)


async def test_another_request_cannot_continue_a_stream(start_stack: StartStack, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text("".join(f'[{name}]\nkey = "key-of-{name}"\n' for name in ("alice", "bob")))
    stack = await start_stack(api_keys_file=str(keys))
    own = {"Authorization": "Bearer key-of-alice"}
    begun = await ask(stack, None, {}, own)
    last = begun.text.removeprefix("id: ").partition("\n")[0]
    calls = len(stack.workers["prefill-0"].calls)
    for body, headers in (
        ({"prompt": "y"}, own),
        ({"temperature": 0.5}, own),
        ({"n": 2}, own),
        ({}, {"Authorization": "Bearer key-of-bob"}),
    ):
        refused = await ask(stack, last, body, headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stream_conflict")
    assert len(stack.workers["prefill-0"].calls) == calls
    assert (await ask(stack, last, {}, own)).status_code == 200


async def test_an_answer_that_came_out_differently_is_not_joined(stack: Stack) -> None:
    _, ids = await read(stack, seed=0)
    for worker in stack.workers.values():
        worker.script = b"other weights write something else here"
    refused = await ask(stack, ids[9], {"seed": 0}, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stream_conflict")
    several = await read(stack, seed=0, n=2)
    for worker in stack.workers.values():
        worker.script = TEXT.encode()
    refused = await ask(stack, several[1][-3], {"seed": 0, "n": 2}, {})
    assert refused.status_code == 409


async def test_a_stream_goes_on_in_another_time_zone(start_stack: StartStack, tmp_path: Path) -> None:
    """And after midnight: the template sees the local time at which the stream began."""
    model = write_toy_model(tmp_path / "toy", chat_template="{{ strftime_now('%d %H') }}")
    stack = await start_stack(model=str(model))
    body = {"messages": MESSAGES, "max_tokens": 20, "stream": True}
    headers = {"X-Event-IDs": "true"}
    with pytest.MonkeyPatch.context() as environment:
        for zone in ("UTC+0", "UTC+12", "UTC+12"):
            environment.setenv("TZ", zone)
            time.tzset()
            answer = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
            last = answer.text.removeprefix("id: ").partition("\n")[0]
            headers = {"Last-Event-ID": last} if zone == "UTC+0" else {}
    time.tzset()
    begun, again, new = (list(call.work.token_ids) for call in stack.workers["prefill-0"].calls)
    assert begun == again != new


async def test_events_have_ids_only_if_the_client_asks(stack: Stack) -> None:
    body = {"prompt": "x", "stream": True}
    for headers, has_ids in (
        ({"X-Request-Id": "mine"}, False),
        ({"X-Event-IDs": "false"}, False),
        ({"X-Event-IDs": "True"}, True),
        ({"Last-Event-ID": ""}, True),
    ):
        answer = await stack.http.post("/v1/completions", json=body, headers=headers)
        assert answer.text.startswith("id: " if has_ids else "data: ")
    responses = "/v1/responses", {"input": "x"}, {"Last-Event-ID": f"{ORIGIN}:3.00000000"}
    for path, body, headers in (("/v1/completions", {"prompt": "x"}, {"X-Event-IDs": "yes"}), responses):
        refused = await stack.http.post(path, json={"stream": True, **body}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(headers)))


async def test_equal_request_ids_give_different_samples(stack: Stack) -> None:
    """A mesh forwards one id to all calls that an application makes for a request of its own."""
    for stream in (False, True):
        for _ in range(3):
            headers = {"X-Request-Id": "mine", "X-Event-IDs": "true"}
            await stack.http.post("/v1/completions", json={"prompt": ["x", "x"], "stream": stream}, headers=headers)
    seeds = [call.work.sampling.seed for call in stack.workers["prefill-0"].calls]
    assert len(set(seeds)) == len(seeds) == 12
