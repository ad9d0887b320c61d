"""The JSON of a body: what is read, and what nobody could write again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.http.bounds import PIECE_BYTES
from paceline.services.gateway.http.reading import parse, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(VALUES, st.booleans())
def test_what_clients_write_is_read(value: Any, escaped: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=escaped).encode()) == value


@pytest.mark.parametrize(
    "text", ['"1e999"', "1.7976931348623157e308", "1e-999", "9" * 350, "0." + "9" * 350, "9e0000002"]
)
def test_numbers_of_doubles_and_integers_are_read(text: str) -> None:
    assert read_json(f"[{text}]".encode()) == json.loads(f"[{text}]")


@pytest.mark.parametrize(
    "text", ["1e999", "-1E+309", "9" * 350 + ".5", "9" * 215 + "e99", "1e0000000400", "NaN", "Infinity", "-Infinity"]
)
@pytest.mark.parametrize("other", ['"x"', '"\\ud83d"'])  # half a pair is for another parser
def test_a_number_that_is_none_as_json_is_refused(text: str, other: str) -> None:
    body = f'{{"tools": [{{"parameters": {{"maximum": {text}, "title": {other}}}}}]}}'.encode()
    with pytest.raises(RequestValidationError):
        parse(body)


@pytest.mark.parametrize("text", ["1e999", "9" * 350 + ".5"])
@pytest.mark.parametrize("before", [0, 1, 4, 199, 349])
def test_a_large_number_between_two_pieces_is_refused(text: str, before: int) -> None:
    padding = "a" * (PIECE_BYTES - len('["",') - before)
    with pytest.raises(RequestValidationError):
        parse(f'["{padding}",{text}]'.encode())
