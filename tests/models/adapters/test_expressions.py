"""Regular expressions of adapters give what Python's give, and end in bounded time whatever they are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ModelError
from paceline.models.adapters.expressions import Expression, StepBudget

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
    expression = Expression(text, StepBudget())
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
    assert Expression(text, StepBudget()).matches(module) == bool(re.fullmatch(text, module))


@pytest.mark.parametrize("text", [r"(a+)+b", r"(a|a)*b", r"(a*)*(a*)*(a*)*b", r"(.*a){20}b", r"((a{1,999}){1,999})*b"])
def test_expressions_that_keep_python_busy_for_ever_end(text: str) -> None:
    assert not Expression(text, StepBudget()).matches("a" * 60)


def test_an_expression_that_takes_too_long_is_refused() -> None:
    with pytest.raises(ModelError, match="take too long"):
        Expression("(?:(?=(?:(?=a*)a)*)a)*b", StepBudget(10_000)).matches("a" * 200)


@pytest.mark.parametrize(
    "text", ["(", "a" * 5000, r"(a)\1", "(?<=a)b", "(?i)a", "(?i:a)", "(?>a)", "a*+", "(" * 2000, r"(a)?(?(1)b|c)"]
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Expression(text, StepBudget())
