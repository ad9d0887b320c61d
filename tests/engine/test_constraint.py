"""Outputs under a grammar: always valid, and the same however the loop runs ahead and whatever it drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.hashing import HashChain
from paceline.core.types import Constraint, ConstraintKind, FinishReason, Key, SamplingParams
from paceline.engine.constraint import Grammars, Matcher
from paceline.engine.request import Request
from paceline.engine.step import Failed, Removed, Sampled
from paceline.models.base import Model
from tests.engine.test_decode_loop import DRAFTS, MAX_TOKENS, Loop, load
from tests.services.gateway.toy_model import END, VOCAB_SIZE, write_toy_model

ENDS = frozenset({END})
WAYS = [(1, "none"), (2, "none"), (1, "lookup"), (2, "lookup"), (2, "early")]


def schema(value: object, **options: object) -> Constraint:
    """Compact, so that short outputs suffice."""
    text = json.dumps({**value, "x-guidance": {"whitespace_flexible": False, **options}})  # type: ignore[dict-item]
    return Constraint(ConstraintKind.JSON_SCHEMA, text, ENDS)


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text, ENDS)


def lark(text: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, text, ENDS)


def choice(*texts: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, json.dumps(texts), ENDS)


@dataclass
class Answer:
    """One output. Its tokens are bytes, and the end."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    failure: str = ""
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        assert self.reason is FinishReason.STOP, self
        assert self.tokens[-1] == END
        return bytes(self.tokens[:-1]).decode()


@dataclass(frozen=True)
class Ask:
    sampling: SamplingParams
    prompt: str = 'abc {"a": [1, 2], "b": "aaa"} abc'
    output: tuple[int, ...] = ()
    """What an earlier attempt has generated."""
    only_first_token: bool = False


class ConstrainedLoop(Loop):
    """A loop whose requests may be constrained; the vocabulary is that of the toy tokenizer, padded."""

    def __init__(self, model: Model, grammars: Grammars, steps_in_flight: int = 2, drafter: str = "lookup") -> None:
        super().__init__(model, steps_in_flight, drafter)
        self._grammars = grammars

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Runs requests side by side."""
        answers = {Key(str(index), 1, 1): Answer() for index in range(len(asks))}
        for key, ask in zip(answers, asks):
            self.engine.add(self._request(key, ask))
        left = set(answers)
        while left:
            event = self._events.get(timeout=30)
            assert not self._failures
            if isinstance(event, Sampled):
                answer = answers[event.key]
                answer.tokens.append(event.token.id)
                answer.logprobs.append(event.token.logprobs)
                answer.reason = event.reason
                if event.reason is not None or asks[int(event.key.request_id)].only_first_token:
                    self.engine.remove(event.key)
            elif isinstance(event, Failed):
                answers[event.key].failure = event.message
                self.engine.remove(event.key)
            elif isinstance(event, Removed):
                left.remove(event.key)
        return list(answers.values())

    def _request(self, key: Key, ask: Ask) -> Request:
        tables = [[self._slots.pop() for _ in range(g.blocks_for(MAX_TOKENS))] for g in self.layout.groups]
        prompt, constraint = list(ask.prompt.encode()), ask.sampling.constraint
        return Request(
            key=key,
            token_ids=[*prompt, *ask.output],
            prompt_len=len(prompt),
            sampling=ask.sampling,
            layout=self.layout,
            chain=HashChain(self.layout.fingerprint),
            tables=tables,
            only_first_token=ask.only_first_token,
            matcher=self._grammars.compile(constraint) if constraint is not None else None,
        )


@pytest.fixture
def grammars(tmp_path: Path) -> Grammars:
    return Grammars(write_toy_model(tmp_path / "toy"))


@pytest.fixture
def model(save_llama: Any, tmp_path: Path) -> Model:
    save_llama(vocab_size=VOCAB_SIZE)
    return load(tmp_path)


@pytest.fixture
def answer(model: Model, grammars: Grammars) -> Any:
    """Answers requests, two steps in flight, with drafts."""

    def run(*asks: Ask) -> list[Answer]:
        loop = ConstrainedLoop(model, grammars)
        answers = loop.answer(asks)
        loop.engine.stop()
        return answers

    return run


def sampled(constraint: Constraint | None, max_tokens: int = 200, **params: Any) -> SamplingParams:
    stops = params.pop("stop_token_ids", ENDS)
    return SamplingParams(constraint=constraint, max_tokens=max_tokens, stop_token_ids=stops, **params)


# ---- whatever the grammar

NAMES = st.sampled_from(["a", "b", "name", 'quo"te', "ключ"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 1000)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.one_of(st.integers(-99, 99), st.text(max_size=4), st.none()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["^[ab]{1,3}$", "^x(yz)?$", "^\\d{4}$"]).map(lambda text: {"type": "string", "pattern": text}),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda form: {"type": "string", "format": form}),
)


def composed(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def an_object(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
        required = [name for name in properties if name not in optional]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.one_of(
        st.builds(an_object, st.dictionaries(NAMES, inner, max_size=3), st.sets(NAMES)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    )


SCHEMAS = st.recursive(LEAVES, composed, max_leaves=4)

REGEXES = st.recursive(
    st.sampled_from(["a", "[b-d]", "[^a-z]", "\\d", "é", "\\.", "[\\w-]", "/", "\\\\", "(?:no|yes)", "[α-ω]", "🙂"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{0,3}", "{2}", "{1,4}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)

SAMPLING = st.builds(
    lambda temperature, seed, penalty, bias, cut: {
        "temperature": temperature,
        "seed": seed,
        "repetition_penalty": penalty,
        "logit_bias": bias,
        **cut,
    },
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1.0, 1.3]),
    st.dictionaries(st.integers(0, 255), st.sampled_from([-100.0, 5.0]), max_size=2),
    st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}]),
)

# Fixtures are only read; each example has loops of its own.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # to shrink takes minutes
examples = settings(max_examples=12, suppress_health_check=list(HealthCheck), phases=PHASES)


def answers_of_all_ways(model: Model, grammars: Grammars, asks: list[Ask]) -> list[Answer]:
    """The answers, which are the same in all ways to run the loop."""
    found = []
    for steps_in_flight, drafter in WAYS:
        loop = ConstrainedLoop(model, grammars, steps_in_flight, drafter)
        found.append(loop.answer(asks))
        loop.engine.stop()
    for other in found[1:]:
        assert [answer.tokens for answer in other] == [answer.tokens for answer in found[0]]
        assert [answer.reason for answer in other] == [answer.reason for answer in found[0]]
    return found[0]


@given(wanted=st.lists(st.tuples(SCHEMAS, SAMPLING), min_size=6, max_size=6))
@examples
def test_outputs_obey_their_schemas(model: Model, grammars: Grammars, wanted: list[Any]) -> None:
    asks = [Ask(sampled(schema(own), **params)) for own, params in wanted]
    for (own, _), answer in zip(wanted, answers_of_all_ways(model, grammars, asks)):
        jsonschema.validate(json.loads(answer.text), own, cls=jsonschema.Draft202012Validator)


@given(wanted=st.lists(st.tuples(REGEXES, SAMPLING), min_size=6, max_size=6))
@examples
def test_outputs_match_their_expressions(model: Model, grammars: Grammars, wanted: list[Any]) -> None:
    asks = [Ask(sampled(regex(own), **params)) for own, params in wanted]
    for (own, _), answer in zip(wanted, answers_of_all_ways(model, grammars, asks)):
        assert re.fullmatch(own, answer.text), (own, answer.text)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(wanted=st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=4), SAMPLING), min_size=6, max_size=6))
@examples
def test_outputs_are_one_of_their_choices(model: Model, grammars: Grammars, wanted: list[Any]) -> None:
    asks = [Ask(sampled(choice(*own), **params)) for own, params in wanted]
    for (own, _), answer in zip(wanted, answers_of_all_ways(model, grammars, asks)):
        assert answer.text in own


EXPRESSION = r"[0-9]{1,2}([+*][0-9]{1,2}){0,3}"


@pytest.mark.parametrize(
    "text",
    [
        "start: term (OPERATOR term){0,3}\nterm: DIGIT | DIGIT DIGIT\nOPERATOR: /[+*]/\nDIGIT: /[0-9]/",
        'root ::= term (("+" | "*") term){0,3}\nterm ::= [0-9] [0-9]?',
        f"start: /{EXPRESSION}/ // a comment at the end",
    ],
)
def test_grammars_of_both_spellings(model: Model, grammars: Grammars, text: str) -> None:
    asks = [Ask(sampled(lark(text), temperature=1.0, seed=seed)) for seed in range(6)]
    for answer in answers_of_all_ways(model, grammars, asks):
        assert re.fullmatch(EXPRESSION, answer.text)


def test_the_constrained_and_the_free_share_steps(model: Model, grammars: Grammars) -> None:
    free = [Ask(sampled(None, 40, temperature=1.0, seed=seed)) for seed in range(4)]
    bound = [Ask(sampled(regex("(?:ab|ba){3,9}"), temperature=1.0, seed=seed)) for seed in range(4)]
    mixed = answers_of_all_ways(model, grammars, [ask for pair in zip(free, bound) for ask in pair])
    alone = answers_of_all_ways(model, grammars, free) + answers_of_all_ways(model, grammars, bound)
    assert mixed[::2] + mixed[1::2] == alone
    assert all(re.fullmatch("(?:ab|ba){3,9}", answer.text) for answer in mixed[1::2])


# ---- where it begins, and where it ends


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


# ---- what cannot be followed


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
    # A part that eats all that the next part needs.
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
    # An end of another kind than before.
    other = grammars.compile(replace(regex("a"), end_token_ids=frozenset({END + 1})))
    other.restart(list(b"a"))
    assert allowed(other) == [{END + 1}]


# ---- one matcher


def allowed(matcher: Matcher) -> list[set[int]]:
    assert not matcher.error
    return [set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()) for mask in matcher.masks]


def test_a_matcher_looks_ahead_along_drafts_and_comes_back(grammars: Grammars) -> None:
    matcher = grammars.compile(regex("a(?:bc|de)f?"))
    matcher.restart([])
    assert allowed(matcher) == [{ord("a")}]
    matcher.advance(list(b"a"), list(b"bcf"))
    assert allowed(matcher) == [{ord("b"), ord("d")}, {ord("c")}, {ord("f"), END}, {END}]
    # The first draft did not come true.
    matcher.advance(list(b"d"), list(b"xx"))
    assert allowed(matcher) == [{ord("e")}]
    matcher.advance(list(b"e"), [END, 5])
    assert allowed(matcher) == [{ord("f"), END}]
    matcher.advance([ord("f")], [VOCAB_SIZE - 1] * DRAFTS)
    assert allowed(matcher) == [{END}]
    matcher.restart(list(b"ab"))
    assert allowed(matcher) == [{ord("c")}]


DEAD_END = 'start: "x" ("a" | "b" X)\nX: /[0-9]+/ & /[x-z]+/\n'
"""Behind "xb" nothing is possible."""


def test_a_draft_that_leads_nowhere_is_not_the_end_of_the_output(grammars: Grammars) -> None:
    matcher = grammars.compile(lark(DEAD_END))
    matcher.restart([])
    matcher.advance(list(b"x"), list(b"b1"))
    assert not matcher.error
    assert len(matcher.masks) == 1
    matcher.advance(list(b"a"), ())
    assert not matcher.error
    matcher.restart(list(b"xb"))
    assert matcher.error
    matcher.restart(list(b"x"))
    assert not matcher.error


@pytest.mark.parametrize(("steps", "drafter"), WAYS)
def test_an_output_into_a_dead_end_is_the_same_with_drafts(
    model: Model, grammars: Grammars, steps: int, drafter: str
) -> None:
    sampling = SamplingParams(constraint=lark(DEAD_END), logit_bias={ord("b"): 100.0}, max_tokens=9)
    loop = ConstrainedLoop(model, grammars, steps, drafter)
    (answer,) = loop.answer([Ask(sampling, prompt="xb1 xb1 xb1 ")])
    loop.engine.stop()
    assert bytes(answer.tokens) == b"xb"
    assert answer.failure


def test_what_was_compiled_once_begins_anew_for_everybody(grammars: Grammars) -> None:
    first, second = (grammars.compile(regex("ab")) for _ in range(2))
    first.restart(list(b"a"))
    second.restart([])
    assert not np.array_equal(first.masks[0], second.masks[0])


def test_text_never_holds_special_tokens(grammars: Grammars) -> None:
    matcher = grammars.compile(regex(r"[\s\S]*"))
    matcher.restart([])
    (first,) = allowed(matcher)
    assert first - set(range(256)) == {END}
    naming = grammars.compile(lark('start: <|user|> "a"'))
    naming.restart([])
    assert allowed(naming) == [{END + 1}]
