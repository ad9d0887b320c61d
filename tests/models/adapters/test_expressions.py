"""Regular expressions of adapters give what Python's give, and end in bounded time whatever they are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ModelError
from paceline.models.adapters.expressions import Expression, MatchingTime

MODULES = [
    "model.layers.1.self_attn.q_proj",
    "model.layers.12.mlp.down_proj",
    "model.visual.blocks.0.attn.qkv",
    "lm_head",
    "q_proj",
    "",
]
EXPRESSIONS = [
    r".*\.(q|down)_proj",
    r"^(?!.*visual).*(?:q_proj|down_proj|qkv)$",
    r"model\.layers\.(1|2)\..*",
    r"model\.layers\.\d+\.(self_attn|mlp)\.\w+",
    r"(.*\.)?layers\.[0-9]{1,2}\.[^.]*\.[a-z]+?_proj",
    r".*\b1\b.*",
    r"(?=.*attn).*",
    r"(a|b)*?|lm_head|[^\W\d]\w*",
    r"model(\.\w+){2,}",
    r"q_proj\Z",
    r"\Aq_proj|\Bx",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_match_as_in_python(text: str) -> None:
    expression = Expression(text, MatchingTime())
    for module in MODULES:
        assert expression.matches(module) == bool(re.fullmatch(text, module)), module
        assert expression.matches_end(module) == bool(re.match(rf"(.*\.)?({text})$", module)), module


ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", "^", "$", r"\b", "(?=a)", "(?!b)"])
TEXTS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda own: f"({'|'.join(own)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{0,2}", "{2}", "{1,}", "*?", "+?"])).map(
            lambda own: f"(?:{own[0]}){own[1]}"
        ),
    ),
    max_leaves=6,
)


@given(TEXTS, st.text("ab.", max_size=5))
def test_any_expression_matches_as_in_python(text: str, module: str) -> None:
    assert Expression(text, MatchingTime()).matches(module) == bool(re.fullmatch(text, module))


@pytest.mark.parametrize("text", [r"(a|aa)+b", r"((a{1,500}){1,500}){1,500}b"])
def test_an_expression_that_takes_too_long_is_refused(text: str) -> None:
    matching = MatchingTime(0.2)
    with pytest.raises(ModelError, match="take too long"):
        Expression(text, matching).matches("a" * 200 + "c" + "b")
    with pytest.raises(ModelError, match="take too long"):  # the time is that of all expressions together
        Expression(text, matching).matches_end("a" * 200 + "c" + "b")


@pytest.mark.parametrize("text", ["(", "a" * 5000, "(" * 2000, "*a", "[", "a{2,1}", "a)|(b"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Expression(text, MatchingTime())
