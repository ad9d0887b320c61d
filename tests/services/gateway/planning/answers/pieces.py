"""Answers in pieces: hypothesis strategies, and the parts that a parser finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from paceline.services.gateway.planning.answers.answer import Part, join_parts
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.form import ReasoningMarks, ToolForm
from paceline.services.gateway.planning.answers.parser import AnswerParser, read_answer

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
"""Any text, also with quotes, backslashes, brackets and line breaks."""

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=6,
)
NAMES = st.text("abcdefg_", min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(NAMES, JSON_VALUES, max_size=4)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
"""Names and arguments of an answer's calls."""


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Return a text in random pieces, as tokens and drafts make them; some are empty."""
    places = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


PLACES = st.lists(st.integers(0, 400), max_size=12)
"""Places to cut any text; see `cut_at`."""


def cut_at(text: str, places: Sequence[int]) -> list[str]:
    """Return a text in pieces. Places beyond its end count from its beginning again."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)])]


def parse(
    pieces: Sequence[str],
    form: ToolForm | None = None,
    thought: ReasoningMarks | None = None,
    *,
    is_open: bool = False,
    tools: Sequence[ToolSpelling] = (),
    is_cut_off: bool = False,
    follows: str = "",
) -> list[Part]:
    """Return the parts of an answer that comes in these pieces. Ids of calls are "id"."""
    types = (form or ToolForm()).argument_types(tools)
    parser = AnswerParser(lambda answer: read_answer(answer, thought, form, is_open, types), lambda: "id")
    parts = [part for piece in pieces for part in parser.push(piece)]
    return join_parts(parts + parser.finish("", is_cut_off, follows))


def loaded(arguments: str) -> Any:
    """Return arguments that a parser has found as a value."""
    return json.loads(arguments)
