"""Grammars: where they begin and end in an output, which ones cannot be followed, and the tokens that they allow."""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.types import Constraint, FinishReason, SamplingParams
from paceline.engine import constraint as constraint_module
from paceline.engine.constraint import Grammar, Grammars, MaskBudget, Matcher
from paceline.models.base import Model
from tests.engine.constrained_loop import WAYS, Ask, ConstrainedLoop, choice, lark, regex, sampled, schema
from tests.engine.loops import DRAFTS
from tests.services.gateway.toy_model import END, VOCAB_SIZE, write_toy_model

# ---- where a grammar begins, and where it ends


def test_an_output_goes_on_elsewhere_as_it_would_have_gone_on(answer: Any) -> None:
    items = {"enum": [1, 22, "x"]}
    sampling = sampled(schema({"type": "array", "items": items, "minItems": 6, "maxItems": 9}), temperature=1.0, seed=4)
    (whole,) = answer(Ask(sampling))
    cuts = range(1, min(7, len(whole.tokens)))
    parts = answer(*(Ask(sampling, output=tuple(whole.tokens[:cut])) for cut in cuts))
    assert [whole.tokens[:cut] + part.tokens for cut, part in zip(cuts, parts)] == [whole.tokens] * len(cuts)
    (first,) = answer(Ask(sampling, only_first_token=True))
    assert first.tokens == whole.tokens[:1]


def test_a_complete_grammar_ends_the_request_whatever_else_was_asked_for(answer: Any) -> None:
    stubborn: dict[str, Any] = {"ignore": {"stop_token_ids": frozenset()}, "least": {"min_tokens": 50}}
    both = {**stubborn["ignore"], **stubborn["least"]}
    for params in ({}, stubborn["ignore"], stubborn["least"], both):
        (found,) = answer(Ask(sampled(regex("yes!"), **params)))
        assert found.text == "yes!"


@pytest.mark.parametrize("params", [{"min_tokens": 30}, {"stop_token_ids": frozenset(), "max_tokens": 30}])
def test_where_a_grammar_may_go_on_the_end_waits(answer: Any, params: dict[str, Any]) -> None:
    # The end is by far the likeliest token.
    (found,) = answer(Ask(sampled(regex("a*"), **{"logit_bias": {END: 100.0}, **params})))
    assert bytes(found.tokens[:30]) == b"a" * 30
    assert found.reason is (FinishReason.STOP if "min_tokens" in params else FinishReason.LENGTH)


def test_max_tokens_cut_an_output(answer: Any) -> None:
    cut, whole = answer(Ask(sampled(choice("abcdef"), max_tokens=6)), Ask(sampled(choice("abcdef"), max_tokens=7)))
    assert (bytes(cut.tokens), cut.reason) == (b"abcdef", FinishReason.LENGTH)
    assert whole.text == "abcdef"


def test_a_stop_token_ends_an_output_early(answer: Any) -> None:
    (found,) = answer(Ask(sampled(choice("abcdef"), stop_token_ids=frozenset({ord("c")}))))
    assert (bytes(found.tokens), found.reason) == (b"abc", FinishReason.STOP)


def test_reports_are_of_the_raw_logits(answer: Any) -> None:
    free, bound = answer(
        Ask(sampled(None, 1, logprobs=5)), Ask(sampled(choice("x"), logprobs=5, logit_bias={ord("x"): -100.0}))
    )
    assert bound.logprobs[0][0].token_id == ord("x")
    reports = [[(entry.token_id, entry.rank) for entry in one.logprobs[0][1:]] for one in (free, bound)]
    assert reports[0] == reports[1]
    values = [[entry.logprob for entry in one.logprobs[0][1:]] for one in (free, bound)]
    assert values[0] == pytest.approx(values[1], abs=1e-4)


# ---- grammars that cannot be followed


@pytest.mark.parametrize(
    ("text", "begins"),
    [("start: <|end|>", b""), ('start: "ab" <|end|> "c"', b"ab"), ('start: "a" tail\ntail: tail "b"', b"a")],
)
def test_a_grammar_that_leads_nowhere_fails_its_request_alone(answer: Any, text: str, begins: bytes) -> None:
    lost, found = answer(Ask(sampled(lark(text))), Ask(sampled(choice("abcabcabc"))))
    assert bytes(lost.tokens).startswith(begins[:1])
    assert lost.failure
    assert lost.reason is None
    assert found.text == "abcabcabc"


def test_a_grammar_without_an_end_goes_on_until_it_is_cut(answer: Any) -> None:
    # The first part takes everything that the second part needs.
    (found,) = answer(Ask(sampled(lark("start: /a+/ /a+/"), max_tokens=40)))
    assert (bytes(found.tokens), found.reason) == (b"a" * 40, FinishReason.LENGTH)


@pytest.mark.parametrize("bad", [regex("("), lark("start: nothing"), schema({"type": "nonsense"})])
def test_what_does_not_compile_is_refused(grammars: Grammars, bad: Constraint) -> None:
    with pytest.raises(InvalidRequestError):
        grammars.compile(bad)


def test_without_a_tokenizer_or_an_end_nothing_can_be_constrained(grammars: Grammars, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Grammars(tmp_path / "nothing").compile(regex("a"))
    with pytest.raises(ModelError, match="eos"):
        grammars.compile(replace(regex("a"), end_token_ids=frozenset()))
    # The same grammar with another end token.
    other = matcher_of(grammars, replace(regex("a"), end_token_ids=frozenset({END + 1})), b"a")
    assert allowed(other) == [{END + 1}]


@pytest.mark.parametrize("how", ["replaced", "link", "gone"])
def test_constraints_are_of_the_tokenizer_at_the_start(tmp_path: Path, how: str) -> None:
    folder = write_toy_model(tmp_path / "model")
    file, other = folder / "tokenizer.json", tmp_path / "other.json"
    # In the other tokenizer, the bytes "a" and "b" have each other's tokens.
    ids = json.loads(file.read_text())
    vocabulary = ids["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other.write_text(json.dumps(ids))
    link = tmp_path / "link"
    link.symlink_to(folder)
    grammars = Grammars(link)
    if how == "replaced":
        other.replace(file)
    elif how == "link":
        link.unlink()
        link.symlink_to(tmp_path)
        other.rename(tmp_path / "tokenizer.json")
    else:
        shutil.rmtree(folder)
    assert allowed(matcher_of(grammars, regex("a"), b"")) == [{ord("a")}]


def test_a_tokenizer_that_was_written_in_place_is_refused(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "model")
    grammars = Grammars(folder)
    with (folder / "tokenizer.json").open("r+") as file:
        file.write("[")
    with pytest.raises(ModelError, match=r"tokenizer\.json has changed since this worker started"):
        grammars.compile(regex("a"))


# ---- a single matcher


def matcher_of(grammars: Grammars, constraint: Constraint, output: bytes = b"") -> Matcher:
    return Matcher(grammars.compile(constraint), list(output))


def allowed(matcher: Matcher) -> list[set[int]]:
    assert not matcher.error
    return [set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()) for mask in matcher.masks]


def test_a_matcher_looks_ahead_along_drafts_and_comes_back(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, regex("a(?:bc|de)f?"))
    assert allowed(matcher) == [{ord("a")}]
    matcher.advance(list(b"a"), list(b"bcf"))
    assert allowed(matcher) == [{ord("b"), ord("d")}, {ord("c")}, {ord("f"), END}, {END}]
    # The first draft was not accepted.
    matcher.advance(list(b"d"), list(b"xx"))
    assert allowed(matcher) == [{ord("e")}]
    matcher.advance(list(b"e"), [END, 5])
    assert allowed(matcher) == [{ord("f"), END}]
    matcher.advance([ord("f")], [VOCAB_SIZE - 1] * DRAFTS)
    assert allowed(matcher) == [{END}]
    assert allowed(matcher_of(grammars, regex("a(?:bc|de)f?"), b"ab")) == [{ord("c")}]


DEAD_END = 'start: "x" ("a" | "b" X)\nX: /[0-9]+/ & /[x-z]+/\n'
"""A grammar with no token that may follow "xb"."""


def test_a_draft_that_leads_nowhere_is_not_the_end_of_the_output(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, lark(DEAD_END))
    matcher.advance(list(b"x"), list(b"b1"))
    assert not matcher.error
    assert len(matcher.masks) == 1
    matcher.advance(list(b"a"), ())
    assert not matcher.error
    assert matcher_of(grammars, lark(DEAD_END), b"xb").error
    assert not matcher_of(grammars, lark(DEAD_END), b"x").error


@pytest.mark.parametrize(("steps", "drafter"), WAYS)
def test_an_output_into_a_dead_end_is_the_same_with_drafts(
    byte_model: Model, grammars: Grammars, steps: int, drafter: str
) -> None:
    sampling = SamplingParams(constraint=lark(DEAD_END), logit_bias={ord("b"): 100.0}, max_tokens=9)
    loop = ConstrainedLoop(byte_model, grammars, steps, drafter)
    (answer,) = loop.answer([Ask(sampling, prompt="xb1 xb1 xb1 ")])
    loop.engine.stop()
    assert bytes(answer.tokens) == b"xb"
    assert answer.failure


def test_requests_share_a_compiled_grammar_and_each_has_a_matcher_of_its_own(grammars: Grammars) -> None:
    assert grammars.compile(regex("ab")) is grammars.compile(regex("ab"))
    first, second = matcher_of(grammars, regex("ab"), b"a"), matcher_of(grammars, regex("ab"))
    assert allowed(first) == [{ord("b")}]
    assert allowed(second) == [{ord("a")}]


def test_a_constraint_that_a_gateway_has_tried_is_not_translated_again(grammars: Grammars) -> None:
    tried = replace(schema({"type": "integer"}), grammar='start: "tried"')
    assert allowed(matcher_of(grammars, tried)) == [{ord("t")}]


def test_equal_constraints_at_the_same_time_are_compiled_once(grammars: Grammars) -> None:
    constraint, together = schema({"properties": {f"p{index}": {} for index in range(99)}}), threading.Barrier(4)

    def compile_one(_: int) -> Grammar:
        together.wait()
        return grammars.compile(constraint)

    with ThreadPoolExecutor(4) as threads:
        assert len({id(found) for found in threads.map(compile_one, range(4))}) == 1


def test_a_grammar_stays_compiled_while_a_request_uses_it(grammars: Grammars) -> None:
    used = grammars.compile(regex("used"))
    others = [grammars.compile(regex(f"other{index}")) for index in range(80)]
    assert grammars.compile(regex("used")) is used
    assert grammars.compile(regex("other79")) is others[79]
    first = weakref.ref(others[0])
    del others
    assert first() is None


def test_large_grammars_are_not_kept_when_nobody_uses_them(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_module, "_CACHED_CHARACTERS", 150)
    first = weakref.ref(grammars.compile(regex("a" * 80)))
    second = grammars.compile(regex("b" * 80))
    assert first() is None
    assert grammars.compile(regex("b" * 80)) is second


def test_an_output_for_whose_masks_all_others_would_wait_ends(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, lark("start: s\ns: (s s)? /[a-z]/ s? | s s s s"))
    for _ in range(250):
        if matcher.error:
            break
        matcher.advance(list(b"a"), ())
    assert "takes too long" in matcher.error


def test_masks_have_a_burst_a_rate_and_a_share_of_the_time() -> None:
    now = 0.0
    budget = MaskBudget(lambda: now)
    assert all(budget.spend(0.01, 1) for _ in range(1000))
    for _ in range(3):
        assert budget.spend(0.2, 0)
        assert not budget.spend(0.1, 0)
        now += 100.0  # it never has more than at first
    assert budget.spend(0.24, 0)
    assert not budget.spend(0.1, 0)
    now += 0.1
    assert not budget.spend(0.1, 0)


def test_outputs_with_one_grammar_share_the_time_for_its_masks(grammars: Grammars) -> None:
    assert matcher_of(grammars, regex("a"))._budget is matcher_of(grammars, regex("a"))._budget


def test_a_constraint_that_does_not_compile_at_the_runner_fails_its_request_alone(answer: Any) -> None:
    lost, found = answer(Ask(sampled(regex("("))), Ask(sampled(choice("abc"))))
    assert lost.failure
    assert not lost.tokens
    assert found.text == "abc"


def test_text_never_holds_special_tokens(grammars: Grammars) -> None:
    (first,) = allowed(matcher_of(grammars, regex(r"[\s\S]*")))
    assert first - set(range(256)) == {END}
    assert allowed(matcher_of(grammars, lark('start: <|user|> "a"'))) == [{END + 1}]
