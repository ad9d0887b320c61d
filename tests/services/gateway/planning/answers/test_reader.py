"""The reader's results do not depend on how the text is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.planning.answers.reader import EndOfAnswerError, FormError, Reader, Steps
from tests.services.gateway.planning.answers.pieces import JSON_VALUES, TEXT, cut


def run(read: Callable[[Reader], Steps[Any]], pieces: list[str], is_cut_off: bool = False) -> Any:
    """Return the result of a computation that reads a text in pieces."""
    reader = Reader()
    steps = read(reader)
    try:
        next(steps)
        for piece in pieces:
            reader.feed(piece)
            next(steps)
        reader.end(is_cut_off)
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("the computation waits after the end")


@given(st.data(), TEXT, TEXT)
def test_text_passes_up_to_the_first_marker(data: st.DataObject, before: str, after: str) -> None:
    passed: list[str] = []
    before = re.sub("[<>]", "", before)
    pieces = data.draw(cut(f"{before}<ab>{after}"))
    assert run(lambda reader: reader.pass_until(("<a", "<ab>", "<abc"), passed.append), pieces) == "<ab>"
    assert "".join(passed) == before


@pytest.mark.parametrize("end", ["", "<", "<a", "<ab"])
def test_the_beginning_of_a_marker_is_text_if_the_answer_ends_there_by_itself(end: str) -> None:
    passed: list[str] = []
    pieces = [*("so " + end)]
    assert run(lambda reader: reader.pass_until(("<abc>",), passed.append, passed.append), pieces) is None
    assert "".join(passed) == "so " + end
    passed.clear()
    assert run(lambda reader: reader.pass_until(("<abc>",), passed.append, passed.append), pieces, True) is None
    assert "".join(passed) == "so "


@given(st.data(), JSON_VALUES, TEXT)
def test_a_json_value_passes_unchanged(data: st.DataObject, value: object, after: str) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.none() | st.just(1)))
    passed: list[str] = []
    run(lambda reader: reader.pass_json(passed.append), data.draw(cut(f"{text},{after}")))
    assert "".join(passed) == text


@given(st.data(), TEXT)
def test_a_json_string_is_read(data: st.DataObject, text: str) -> None:
    pieces = data.draw(cut(json.dumps(text, ensure_ascii=data.draw(st.booleans())) + " more"))
    assert run(lambda reader: reader.json_string(), pieces) == text


def test_the_members_of_an_object_come_one_after_the_other() -> None:
    def names(reader: Reader) -> Steps[list[str]]:
        found = []
        while (name := (yield from reader.json_members())) is not None:
            found.append(name)
            yield from reader.pass_json(lambda text: None)
            yield from reader.skip_space()
        return found

    assert run(names, [*'{"a" : [1, {"x": "}"}] , "b\\u00e9":"," }']) == ["a", "bé"]
    assert run(names, ["{}"]) == []


def test_the_longest_of_the_options_is_chosen() -> None:
    def choose(reader: Reader) -> Steps[str | None]:
        return (yield from reader.choose(("ab", "abcd")))

    assert run(choose, ["a", "b", "c", "x"]) == "ab"
    assert run(choose, ["a", "bcd"]) == "abcd"
    assert run(choose, ["x"]) is None
    assert run(choose, ["abc"]) == "ab"


def test_a_missing_text_and_an_early_end_are_told_apart() -> None:
    with pytest.raises(FormError):
        run(lambda reader: reader.expect("</tool>"), ["</toad>"])
    with pytest.raises(EndOfAnswerError):
        run(lambda reader: reader.expect("</tool>"), ["</to"])
    with pytest.raises(EndOfAnswerError):
        run(lambda reader: reader.pass_json(lambda text: None), ['{"a": "b'])


def test_kept_text_and_long_white_space_are_not_read_again_with_each_token() -> None:
    """The reader would copy all of the text for each token."""
    longest = 0

    def read(reader: Reader) -> Steps[None]:
        nonlocal longest
        yield from reader.expect("a")
        reader.keep()
        for _ in range(1000):
            yield from reader.expect("bc")
            longest = max(longest, len(reader._text))
        yield from reader.skip_space()
        longest = max(longest, len(reader._text))
        reader.restore()
        assert reader.unread == 2000 + 500 + 1
        yield from reader.pass_until(("d",), lambda text: None)

    run(read, ["a", *["bc"] * 1000, *[" "] * 500, "d"])
    assert longest <= 2


def test_text_can_be_read_again_from_a_kept_place() -> None:
    passed: list[str] = []

    def read(reader: Reader) -> Steps[str | None]:
        yield from reader.expect("a")
        reader.keep()
        yield from reader.expect("bc")
        reader.restore()
        return (yield from reader.pass_until(("d",), passed.append))

    assert run(read, [*"abcd"]) == "d"
    assert "".join(passed) == "bc"
