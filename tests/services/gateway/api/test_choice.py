"""Deltas of a choice. The work for many tokens at once is in proportion to their number."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import SamplingParams, Token
from paceline.services.gateway.api import choice as module
from paceline.services.gateway.api.choice import Choice, Delta, join_deltas
from paceline.services.gateway.planning.answers.answer import (
    Answer,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    join_parts,
)
from paceline.services.gateway.planning.answers.reader import Steps
from paceline.services.gateway.planning.plan import AnswerPlan, Plan, PromptPlan
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.sequences.progress import Generated

PARTS = st.one_of(
    st.builds(Content, st.text(max_size=3)),
    st.builds(Reasoning, st.text(max_size=3)),
    st.builds(CallBegin, st.integers(0, 1), st.just("id"), st.just("f")),
    st.builds(CallArguments, st.integers(0, 1), st.text(max_size=3)),
)


@given(st.lists(PARTS, max_size=12))
def test_joined_parts_are_the_same_text_without_equal_neighbours(parts: list[Part]) -> None:
    def key(part: Part) -> tuple[type, int]:
        return type(part), getattr(part, "index", 0)

    joined = join_parts(parts)
    flat: list[Part] = []
    for part in parts:
        if flat and key(flat[-1]) == key(part) and not isinstance(part, CallBegin):
            flat[-1] = type(part)(**{**_fields(part), "text": flat[-1].text + part.text})  # type: ignore[union-attr]
        else:
            flat.append(part)
    assert joined == flat


def _fields(part: Any) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__slots__}


@pytest.mark.parametrize("is_parsed", [False, True])
def test_many_tokens_at_once_are_joined_once(
    toy_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_parsed: bool
) -> None:
    writes = 0

    class Counting(Delta):
        def __setattr__(self, name: str, value: object) -> None:
            nonlocal writes
            writes += name in ("text", "parts")
            super().__setattr__(name, value)

    def read(answer: Answer) -> Steps[None]:
        yield from answer.read_content(("<",))

    monkeypatch.setattr(module, "Delta", Counting)
    answer = AnswerPlan(read, frozenset()) if is_parsed else None
    prompt = PromptPlan(None, [1], SamplingParams(max_tokens=1 << 20), answer=answer)
    plan = Plan(prompts=[prompt], n=1, stop=(), include_stop=False, skip_special_tokens=True, cache_salt="")
    reader = Choice(0, plan, toy_tokenizer)
    delta = reader.take(Generated([Token(token, ()) for token in b"word " * 2000]))
    assert delta is not None
    assert delta.text.rstrip() == ("word " * 2000).rstrip()
    assert writes < 20


def test_deltas_are_joined() -> None:
    deltas = [Delta(1, "a", tokens=[Token(1, ())]), Delta(1, "b", reasoning_tokens=2, finish_reason="stop")]
    assert join_deltas(deltas) == Delta(1, "ab", reasoning_tokens=2, tokens=[Token(1, ())], finish_reason="stop")
    parts = [Delta(0, "a", [Content("a")]), Delta(0, "b", [Content("b"), Reasoning("c")])]
    assert join_deltas(parts) == Delta(0, "ab", [Content("ab"), Reasoning("c")])
