"""Outputs under any grammar are valid, and do not depend on running ahead or on drafts."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline.engine.constraint import Grammars
from paceline.models.base import Model
from tests.engine.constrained_loop import Ask, answers_of_all_ways, choice, lark, regex, sampled, schema

pytestmark = pytest.mark.slow

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


# Examples only read the fixtures, and each has loops of its own.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking would take minutes


examples = settings(max_examples=6, suppress_health_check=list(HealthCheck), phases=PHASES)


@given(wanted=st.lists(st.tuples(SCHEMAS, SAMPLING), min_size=6, max_size=6))
@examples
def test_outputs_obey_their_schemas(byte_model: Model, grammars: Grammars, wanted: list[Any]) -> None:
    asks = [Ask(sampled(schema(own), **params)) for own, params in wanted]
    for (own, _), answer in zip(wanted, answers_of_all_ways(byte_model, grammars, asks)):
        jsonschema.validate(json.loads(answer.text), own, cls=jsonschema.Draft202012Validator)


@given(wanted=st.lists(st.tuples(REGEXES, SAMPLING), min_size=6, max_size=6))
@examples
def test_outputs_match_their_expressions(byte_model: Model, grammars: Grammars, wanted: list[Any]) -> None:
    asks = [Ask(sampled(regex(own), **params)) for own, params in wanted]
    for (own, _), answer in zip(wanted, answers_of_all_ways(byte_model, grammars, asks)):
        assert re.fullmatch(own, answer.text), (own, answer.text)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(wanted=st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=4), SAMPLING), min_size=6, max_size=6))
@examples
def test_outputs_are_one_of_their_choices(byte_model: Model, grammars: Grammars, wanted: list[Any]) -> None:
    asks = [Ask(sampled(choice(*own), **params)) for own, params in wanted]
    for (own, _), answer in zip(wanted, answers_of_all_ways(byte_model, grammars, asks)):
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
def test_grammars_of_both_spellings(byte_model: Model, grammars: Grammars, text: str) -> None:
    asks = [Ask(sampled(lark(text), temperature=1.0, seed=seed)) for seed in range(6)]
    for answer in answers_of_all_ways(byte_model, grammars, asks):
        assert re.fullmatch(EXPRESSION, answer.text)


def test_the_constrained_and_the_free_share_steps(byte_model: Model, grammars: Grammars) -> None:
    free = [Ask(sampled(None, 40, temperature=1.0, seed=seed)) for seed in range(4)]
    bound = [Ask(sampled(regex("(?:ab|ba){3,9}"), temperature=1.0, seed=seed)) for seed in range(4)]
    mixed = answers_of_all_ways(byte_model, grammars, [ask for pair in zip(free, bound) for ask in pair])
    alone = answers_of_all_ways(byte_model, grammars, free) + answers_of_all_ways(byte_model, grammars, bound)
    assert mixed[::2] + mixed[1::2] == alone
    assert all(re.fullmatch("(?:ab|ba){3,9}", answer.text) for answer in mixed[1::2])
