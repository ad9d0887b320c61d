"""The lines of an input file."""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.api.batches.lines import (
    InputCheck,
    InvalidLineError,
    LineReply,
    answer_line,
    call,
    read_line,
    split_lines,
)
from paceline.services.gateway.http.access.callers import Caller
from paceline.services.gateway.http.reading import parse
from paceline.services.gateway.http.request_scope import RequestScope, set_scope
from tests.services.gateway.api.batches.conftest import line

ENDPOINT = "/v1/completions"


async def pieces_of(data: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    ends = sorted(min(cut, len(data)) for cut in cuts)
    for start, end in zip([0, *ends], [*ends, len(data)]):
        yield data[start:end]


@given(st.lists(st.binary(max_size=12)), st.lists(st.integers(0, 100), max_size=5))
async def test_lines_do_not_depend_on_how_the_file_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(parts)
    expected = [(number, each.strip()) for number, each in enumerate(data.split(b"\n"), 1) if each.strip()]
    assert [each async for each in split_lines(pieces_of(data, cuts), 100)] == expected


async def test_a_long_line_is_cut_so_that_memory_is_bounded() -> None:
    found = [each async for each in split_lines(pieces_of(b"x" * 1000 + b"\nb", [300, 600]), 10)]
    assert found == [(1, b"x" * 11), (2, b"b")]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"custom_id": ""}, "missing_required_parameter"),
        ({"custom_id": 7}, "missing_required_parameter"),
        ({"method": "GET"}, "invalid_method"),
        ({"url": "/v1/chat/completions"}, "mismatched_url"),
        ({"url": "/fleet"}, "invalid_url"),
        ({"body": []}, "missing_required_parameter"),
        ({"body": {"stream": True}}, "invalid_request"),
        ({"body": {"background": True}}, "invalid_request"),
    ],
)
def test_a_line_that_is_no_request_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidLineError) as caught:
        read_line(3, json.dumps({**line("a"), **change}).encode(), [ENDPOINT], 10_000)
    assert (caught.value.error.code, caught.value.error.line) == (code, 3)


def test_a_line_is_read_as_the_body_of_a_request_is() -> None:
    texts = {"user": "half of a character \ud83d"}  # clients leave it where they cut a text
    found = read_line(1, codecs.BOM_UTF8 + json.dumps({**line("a"), "body": texts}).encode(), [ENDPOINT], 10_000)
    assert found.body == parse(json.dumps(texts).encode()) == texts
    for value in ("NaN", "Infinity", '"\x00"'):
        with pytest.raises(InvalidLineError, match="not valid JSON"):
            read_line(1, f'{{"custom_id": "a", "body": {{"top_p": {value}}}}}'.encode(), [ENDPOINT], 10_000)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_line_or_an_error(data: bytes) -> None:
    check = InputCheck(ENDPOINT, 10, 50)
    check.add(1, data)
    assert check.errors


def test_the_errors_of_a_file_name_its_lines() -> None:
    check = InputCheck(ENDPOINT, 3, 10_000)
    for number, each in enumerate(["a", "a", "b", "c"], 1):
        check.add(number, json.dumps(line(each)).encode())
    check.finish()
    assert [(error.code, error.line) for error in check.errors] == [
        ("duplicate_custom_id", 2),
        ("too_many_lines", None),
    ]
    empty = InputCheck(ENDPOINT, 3, 10)
    empty.finish()
    assert [error.code for error in empty.errors] == ["empty_file"]


@pytest.mark.parametrize("body", ["null", '{"a":null}', '{"a":[1,"null},"]}'])
@pytest.mark.parametrize("custom_id", ["a", 'null},"x":{"', "\u2028\ud800"])
def test_an_answer_is_in_its_line_as_it_came(custom_id: str, body: str) -> None:
    text = answer_line(custom_id, LineReply(200, "r", body))
    assert text.isascii()
    told = json.loads(text)
    assert told.keys() == {"id", "custom_id", "response", "error"}
    response = {"status_code": 200, "request_id": "r", "body": json.loads(body)}
    assert (told["custom_id"], told["response"], told["error"]) == (custom_id, response, None)


async def test_answers_are_lines_for_all_readers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        set_scope(scope, cast(RequestScope, SimpleNamespace(error_type="")))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": '{"a": "é\u2028"}'.encode()})

    sent = read_line(1, json.dumps(line("a")).encode(), [ENDPOINT], 1000)
    reply = await call(app, ENDPOINT, sent, Caller("", "", is_admin=False))
    assert reply.body == '{"a":"\\u00e9\\u2028"}'
