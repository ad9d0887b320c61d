"""What the JSON of a body may hold, and that a body with more never becomes objects."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from paceline.core.config.http import HttpOptions
from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.http import reading
from paceline.services.gateway.http.bounds import (
    BYTE_COST,
    DIGITS_PER_VALUE,
    FRACTION_VALUES,
    MOST_WRITTEN_VALUES,
    NAME_VALUES,
    PLAIN_DIGITS,
    BodyMemory,
    Bounds,
    JsonCount,
    RequestMemory,
    check_written,
    count_json,
)
from paceline.services.gateway.http.errors import ApiError
from tests.services.gateway.conftest import Stack, StartStack, eventually

TEXTS = st.text(st.sampled_from('"\\{[,:é\n\ud83d\ude00a'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)
HEADERS = {"content-type": "application/json"}


def test_one_caller_has_half_of_the_memory_and_gives_it_back() -> None:
    memory = BodyMemory(100)
    first, second, other = (RequestMemory(memory) for _ in range(3))
    first.take("a", 30)
    first.take("a", 10)
    with pytest.raises(HTTPException) as caught:
        second.take("a", 11)
    assert (caught.value.status_code, int(caught.value.headers["Retry-After"]) > 0) == (429, True)
    other.take("b", 50)
    assert memory.used == 90
    with pytest.raises(HTTPException) as caught:
        RequestMemory(memory).take("c", 11)
    assert caught.value.status_code == 429
    first.close()
    first.close()
    second.take("a", 50)
    with pytest.raises(HTTPException) as caught:
        RequestMemory(memory).take("c", 51)
    assert caught.value.status_code == 413
    for each in (second, other):
        each.close()
    assert (memory.used, memory._of_owner) == (0, {})


async def test_bodies_that_find_no_memory_are_refused(start_stack: StartStack, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text('[a]\nkey = "a"\n[b]\nkey = "b"\n')
    stack = await start_stack(body_memory=str(200_000 * BYTE_COST), api_keys_file=str(file))
    stack.pause_decode(after=1)
    body = {"prompt": "x", "max_tokens": 9, "user": "u" * 60_000}

    async def post(key: str) -> tuple[int, str]:
        answer = await stack.http.post("/v1/completions", json=body, headers={"x-api-key": key})
        return answer.status_code, answer.headers.get("retry-after", "")

    running = asyncio.create_task(post("a"))
    await eventually(lambda: stack.workers["decode-0"].active == 1)
    status, again = await post("a")
    assert (status, again.isdecimal()) == (429, True)
    other = asyncio.create_task(post("b"))
    await eventually(lambda: stack.workers["decode-0"].active == 2)
    for worker in stack.workers.values():
        worker.resume.set()
    assert [(await each)[0] for each in (running, other)] == [200, 200]
    assert (await post("a"))[0] == 200
    body["user"] = "u" * 120_000
    assert (await post("a"))[0] == 413


def counted(value: Any) -> tuple[int, int]:
    """Return the values and the objects in a value, by walking through it."""
    if isinstance(value, float | bool):
        return FRACTION_VALUES * sum(json.dumps(value).count(mark) for mark in ".e"), 0
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    names = NAME_VALUES * len(value) if isinstance(value, dict) else 0
    return 1 + names + max(0, len(value) - 1) + sum(own for own, _ in inner), 1 + sum(own for _, own in inner)


@given(VALUES, st.booleans(), st.integers(1, 7))
def test_values_are_counted_in_the_bytes(value: Any, escaped: bool, size: int) -> None:
    text = json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    count = JsonCount()
    for begin in range(0, len(text), size):
        count.add(text[begin : begin + size])
    assert (count.values, count.objects) == counted(value)


@given(st.binary(max_size=200).map(lambda data: data.replace(b"a", b'\\"')), st.integers(1, 9))
def test_how_bytes_are_cut_does_not_matter(data: bytes, size: int) -> None:
    whole, cut = JsonCount(), JsonCount()
    whole.add(data)
    for begin in range(0, len(data), size):
        cut.add(data[begin : begin + size])
    assert (whole.values, whole.objects) == (cut.values, cut.objects)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_digits_of_the_longest_number_are_counted(size: int) -> None:
    text, count = f'[12, {{"{"9" * 500}": -{"7" * 401}}}, "{"8" * 600}", 3]'.encode(), JsonCount()
    for begin in range(0, len(text), size):
        count.add(text[begin : begin + size])
    assert count.digits == 401


def test_a_backslash_at_the_end_of_each_piece_is_kept_alone() -> None:
    count = JsonCount()
    for _ in range(1001):
        count.add(b"\\" * 999)
    assert len(count._escape) <= 1


def test_arguments_of_calls_hold_a_number_of_values_together() -> None:
    half = json.dumps([1] * (MOST_WRITTEN_VALUES // 2 - 9))
    check_written([half, '"' + "," * MOST_WRITTEN_VALUES, half], "messages")
    for texts in ([half] * 3, [json.dumps([0.5] * (MOST_WRITTEN_VALUES // 8))]):
        with pytest.raises(InvalidRequestError, match=r"^messages: arguments of tool calls"):
            check_written(texts, "messages")


BOUNDS = Bounds(values=100, objects=100, messages=3, parts=4, tools=2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{}] * 4}, "messages"),
        ({"messages": [[{}], [{}] * 4]}, "messages"),
        ({"input": [{}] * 4}, "input"),
        ({"messages": [{"content": ["", ""]}, {"content": ["", "", ""]}]}, "messages"),
        ({"tools": [{}] * 3}, "tools"),
        ({"chat_request": {"messages": [{}] * 4}}, "chat_request.messages"),
        ({"messages": [{}] * 3, "tools": [{}] * 2, "input": "a text"}, None),
        ({"messages": [[{}] * 3] * 3}, None),
        ({"messages": {"not": "a list"}, "tools": "none"}, None),
        ([1, 2, 3, 4], None),
    ],
)
def test_lists_have_bounds(body: Any, param: str | None) -> None:
    if param is None:
        BOUNDS.check_lists(body)
        return
    with pytest.raises(ApiError, match=f"^{param}: .*--max-") as caught:
        BOUNDS.check_lists(body)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


async def test_a_million_values_never_become_objects(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = reading.parse
    monkeypatch.setattr(reading, "parse", lambda body: parsed.append(len(body)) or parse(body))
    options = HttpOptions()
    for path, body in (
        ("/v1/chat/completions", b'{"messages": [' + b"{}," * (options.max_body_objects + 1) + b"{}]}"),
        ("/tokenize", b'{"messages": [' + b"[]," * (options.max_body_objects + 1) + b"{}]}"),
        ("/detokenize", b'{"tokens": [' + b"1," * (options.max_body_values + 1) + b"1]}"),
        ("/v1/responses", b'{"input": [' + b"0.5," * (options.max_body_values // 9) + b"1]}"),
        ("/invocations", b'{"token_ids": [' + b"1," * (options.max_body_values + 1) + b"1]}"),
    ):
        answer = await stack.http.post(path, content=body, headers=HEADERS)
        assert answer.status_code == 413, answer.text
        assert "--max-body-" in answer.json()["error"]["message"]
    assert not parsed
    # Messages are counted before any is validated: the second one is no message.
    messages = [{"role": "user", "content": "x"}, 5] + [{}] * options.max_messages
    answer = await stack.post("/v1/chat/completions", messages=messages)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "--max-messages" in answer.json()["error"]["message"]
    assert len(parsed) == 1


async def test_arguments_of_calls_that_hold_too_much_are_refused_before_they_are_read(stack: Stack) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" + "{}," * MOST_WRITTEN_VALUES}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [call]}]
    answer = await stack.post("/v1/chat/completions", messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages: arguments of tool calls have more than")


async def test_the_bounds_are_options(start_stack: StartStack) -> None:
    stack = await start_stack(max_body_values=30, max_body_objects=5, max_tools=1, max_content_parts=1)
    assert (await stack.post("/tokenize", prompt="[[[[[[[[[[" + "," * 100)).status_code == 200
    assert (await stack.post("/detokenize", tokens=[1] * 24)).status_code == 200
    assert (await stack.post("/detokenize", tokens=[1] * 26)).status_code == 413
    parts = [{"role": "user", "content": ["a", "b"]}]
    refused = await stack.post("/v1/chat/completions", messages=parts)
    assert "--max-content-parts" in refused.json()["error"]["message"]
    refused = await stack.http.post("/tokenize", content=b'{"x": ' + b"9" * 401 + b"}", headers=HEADERS)
    assert (refused.status_code, "digits" in refused.text) == (400, True)
    utf16 = '{"prompt": "∀"}'.encode("utf-16-le")  # a half of this character is a quote
    refused = await stack.http.post("/tokenize", content=utf16, headers=HEADERS)
    assert (refused.status_code, "not valid JSON" in refused.text) == (400, True)


def test_digits_of_long_numbers_count() -> None:
    few, many = count_json(b"[1.5,%d]" % (10**17)), count_json(b"[1.5,%d]" % (10**103))

    assert many.values - few.values == (104 - PLAIN_DIGITS) // DIGITS_PER_VALUE
    assert few.values == count_json(b"[1.5,1]").values
