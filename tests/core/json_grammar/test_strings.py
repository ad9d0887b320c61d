"""Every spelling of JSON's strings is allowed wherever a schema allows the string."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from paceline.core.json_grammar.pattern_characters import PatternError, UnsupportedPatternError
from paceline.core.json_grammar.patterns import translated
from tests.core.json_grammar.matching import accepts, allows, matcher_of

_SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


def spelled(text: str, styles: list[int]) -> str:
    """Return a JSON string whose characters are spelled in these ways, in turn."""
    pieces = []
    for index, character in enumerate(text):
        units = character.encode("utf-16-be").hex()
        codes = "".join("\\u" + units[at : at + 4] for at in range(0, len(units), 4))
        ways = [codes, re.sub("[a-f]", lambda match: match[0].upper(), codes)]
        ways += [_SHORT[character]] if character in _SHORT else []
        ways += [character] if character >= " " and character not in '"\\' else []
        pieces.append(ways[styles[index % len(styles)] % len(ways)])
    return '"' + "".join(pieces) + '"'


def dumped(value: Any, styles: list[int]) -> str:
    """Return a value as JSON whose strings are spelled in these ways."""
    if isinstance(value, str):
        return spelled(value, styles)
    if isinstance(value, list):
        return "[" + ", ".join(dumped(item, styles) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spelled(key, styles)}: {dumped(item, styles)}" for key, item in value.items()) + "}"
    return json.dumps(value)


_STYLES = st.lists(st.integers(0, 3), min_size=1, max_size=8)
_ANY = matcher_of({})


@given(_VALUES, _STYLES)
def test_all_json_in_every_spelling_is_allowed_where_anything_is(value: Any, styles: list[int]) -> None:
    text = dumped(value, styles)
    assert json.loads(text) == value
    assert allows(_ANY, text)
    for is_ascii in (True, False):
        assert allows(_ANY, json.dumps(value, ensure_ascii=is_ascii))


@given(_TEXT, _STYLES)
def test_limits_of_length_count_characters_not_their_spellings(text: str, styles: list[int]) -> None:
    exact, more = ({"type": "string", "minLength": size, "maxLength": size} for size in (len(text), len(text) + 1))
    assert [accepts(each, spelled(text, styles)) for each in (exact, more)] == [[True], [False]]


@pytest.mark.model
@given(_TEXT, _STYLES)
def test_a_real_tokenizer_reaches_every_spelling_token_by_token(
    smollm_tokenizer: tuple[Tokenizer, LLTokenizer], text: str, styles: list[int]
) -> None:
    tokenizer, library = smollm_tokenizer
    matcher = matcher_of({"type": "object", "additionalProperties": {"type": "string"}}, library)
    answer = f"{{{spelled(text, styles)}: {spelled(text, styles)}}}"
    tokens = tokenizer.encode(answer, add_special_tokens=False).ids
    assume(tokenizer.decode(tokens, skip_special_tokens=False) == answer)  # its vocabulary lacks some bytes
    for token in tokens:
        mask = matcher.compute_bitmask()
        assert mask[token >> 3] >> (token & 7) & 1, (answer, token)
        matcher.consume_token(token)
    assert matcher.is_accepting()


@pytest.fixture(scope="module")
def smollm_tokenizer() -> tuple[Tokenizer, LLTokenizer]:
    path = str(Path("~/.cache/paceline/smollm2-135m-instruct/tokenizer.json").expanduser())
    return Tokenizer.from_file(path), LLTokenizer(path, eos_token=2)


def test_half_a_pair_of_surrogates_is_not_allowed() -> None:
    texts = [r'"\ud83d"', r'"\ude00"', r'"\ud83d\n"', r'"\ud83d\ud83d"', r'"\ud83d\ude00"']
    assert accepts({"type": "string"}, *texts) == [False] * 4 + [True]


def test_given_texts_are_spelled_as_encoders_spell_them() -> None:
    text = "Café/<b>😀"
    spellings = [
        json.dumps(text),
        json.dumps(text, ensure_ascii=False),
        '"Caf\\u00E9\\/\\u003cb\\u003E\\uD83D\\uDE00"',
    ]
    assert all(accepts({"const": text}, *spellings))
    assert all(accepts({"enum": ["x", text]}, *spellings))
    schema = {"type": "object", "properties": {text: {"type": "null"}}, "required": [text]}
    assert all(accepts(schema, *(f"{{{each}:null}}" for each in spellings)))
    assert accepts({"const": "ab"}, '"ab"', r'"\u0061b"') == [True, False]  # an escape that no encoder writes


def test_a_name_that_is_taken_is_taken_in_every_spelling() -> None:
    schema = {"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": True}
    assert accepts(schema, '{"ab":null}', r'{"\u0061b":1}', r'{"\u0061c":1}') == [True, False, True]


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        (r"^\d{3}-[a-z]+$", ["123-abc"], ["123-ABC", "1234-a"]),
        ("b+", ["abbb", "éb"], ["ac"]),
        (r"^.{2,3}$", ["aé", "a😀/"], ["a", "abcd", "a\n"]),
        ("^(foo|bar)$", ["foo", "bar"], ["foobar"]),
        ("(^a$|^b$)", ["a", "b"], ["ab"]),
        ("a|b$", ["cac", "cab"], ["cbc"]),
        ("^[^/]+$", ["ab", "é"], ["a/b", ""]),
        ("(?i)^abc$", ["aBc"], ["abd"]),
        (r"^(?:[a-z]{2}|x)?y*?$", ["aby", "x", ""], ["zzz"]),
        (r"^(?!.*bad)(?=.*[0-9]).*$", ["ab1"], ["ab", "1bad1"]),
        (r"^[\]\-a\x2f\u00e9]+$", ["]-a/é"], ["b"]),
        (r"^\s\S$", [" x", "\té"], ["xx"]),
        ("^a{,2}$", ["", "aa"], ["aaa"]),
        ("^a{x}$", ["a{x}"], ["a"]),
    ],
)
def test_patterns(pattern: str, fitting: list[str], other: list[str]) -> None:
    matcher = matcher_of({"type": "string", "pattern": pattern})
    for text in [*fitting, *other]:
        for is_ascii in (True, False):
            assert allows(matcher, json.dumps(text, ensure_ascii=is_ascii)) == (text in fitting), text


def test_patterns_of_free_text_allow_every_spelling() -> None:
    assert all(accepts({"type": "string", "pattern": "^.{3}$"}, r'"\u0061\/\ud83d\ude00"', r'"\t/\\"'))
    no_escape_hides = {"type": "string", "pattern": "^(?!.*bad).*$"}
    assert accepts(no_escape_hides, r'"b\u0061d"', r'"b\u0061t"') == [False, True]


def test_categories_of_characters() -> None:
    assert accepts({"type": "string", "pattern": r"^\p{Lu}[\w-]*$"}, '"É-1"', '"é-1"') == [True, False]


@pytest.mark.parametrize("pattern", ["(", "a)", "[a", "*a", "a{2,1}", "[z-a]", "\\", r"\xzz"])
def test_patterns_that_cannot_be_read(pattern: str) -> None:
    with pytest.raises(PatternError) as caught:
        translated(pattern)
    assert not isinstance(caught.value, UnsupportedPatternError)


@pytest.mark.parametrize(
    "pattern", ["(?<=a)b", r"(a)\1", r"a\bb", "a^b", "a$b", "x(?=y)", "(^a)b", "a" + "(" * 200 + "b" + ")" * 200]
)
def test_patterns_that_no_grammar_can_enforce(pattern: str) -> None:
    with pytest.raises(UnsupportedPatternError):
        translated(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["a{2,4}", "b*", "a+b{1,3}", "^a{1,2}", "a{2,3}$", "(ab){2,5}|c{3,}", "a?b?", "[ab]{0,9}c{0,2}", "(a|b){2}c+", ""],
)
@given(st.text("abc", max_size=7))
def test_repetitions_at_the_ends_of_a_pattern(pattern: str, text: str) -> None:
    found = re.search(pattern, text) is not None
    assert accepts({"type": "string", "pattern": pattern}, json.dumps(text)) == [found]


def test_counts_beside_free_text_cost_nothing() -> None:
    assert translated("a{3,90}b{0,9}").wanted == translated("a{3}").wanted
    assert translated("^a{3,90}").wanted == translated("^a{3}").wanted
    assert translated("^a{3,90}$").wanted != translated("^a{3}$").wanted
    matcher = matcher_of({"type": "string", "pattern": r"[\p{L}\p{N}]{1,64}"})
    for byte in ('"' + "жé1" * 30).encode():
        matcher.compute_bitmask()
        assert matcher.consume_token(byte), matcher.get_error()
