"""Large answers are the same JSON as small ones, and are written in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.api import respond
from paceline.services.gateway.api.respond import LargeJson

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner), max_leaves=40
)


@given(values, st.integers(1, 4), st.integers(0, 4))
def test_it_is_the_value(value: Any, size: int, few: int) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(respond, "_SLICE", size)
        patch.setattr(respond, "_FEW", few)
        assert LargeJson(value).body == text


def test_no_piece_is_large() -> None:
    top = {f"token {number}": -float(number) for number in range(21)}
    logprobs = {"tokens": ["x"] * 9000, "top_logprobs": [top] * 9000}
    pieces = [*respond._pieces({"choices": [{"text": "x", "logprobs": logprobs}] * 3}, respond._DEPTH)]
    assert max(map(len, pieces)) < 64 << 10
