"""The input of custom tools, read from JSON however it is cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.api.response_format import CustomInput
from paceline.services.gateway.api.responses.tools import joined_name
from tests.services.gateway.planning.answers.pieces import TEXT, cut

TEXTS = TEXT | st.text(st.sampled_from('"\\\n\t/u{}d8🌂é\u2028'), max_size=12)


def read(pieces: list[str]) -> str:
    reader = CustomInput()
    return "".join([*map(reader.push, pieces), reader.finish()])


@given(st.data(), TEXTS, st.booleans())
def test_the_input_is_the_string_in_the_arguments(data: st.DataObject, text: str, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert read(data.draw(cut(arguments))) == text


@given(st.data(), TEXTS, st.booleans())
def test_what_was_cut_off_is_the_beginning_of_the_input(data: st.DataObject, text: str, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    end = data.draw(st.integers(0, len(arguments)))
    assert text.startswith(read(data.draw(cut(arguments[:end]))))


def test_halves_of_characters_are_replaced() -> None:
    assert read(['{"input":"a\\ud800', 'b\\udc00c\\ud83c\\udf02"}']) == "a\ufffdb\ufffdc🌂"


def test_an_escaped_backslash_begins_no_half_of_a_character() -> None:
    text = "C:\\ud83d"
    arguments = json.dumps({"input": text})
    assert read([arguments[:-2], arguments[-2:]]) == text
    assert read([r'{"input":"\\\ud83c', r'\udf02"}']) == "\\🌂"


def test_other_arguments_are_the_input_as_they_are() -> None:
    assert read(['{"patch": ', '"x"}']) == '{"patch": "x"}'


def test_names_are_joined_by_two_underscores() -> None:
    assert [joined_name("f", space) for space in (None, "a", "a__")] == ["f", "a__f", "a__f"]
