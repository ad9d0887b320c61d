"""Grammars of answers: which texts they allow, with markers that are tokens of their own and with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.form import ReasoningMarks
from paceline.services.gateway.planning.answers.forms.hermes import Hermes
from paceline.services.gateway.planning.answers.grammar import Choice, answer_grammar
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import END, write_toy_model

THINK = ReasoningMarks("<think>", "</think>")
TOOLS = (
    ToolSpelling(
        "find",
        {
            "type": "object",
            "properties": {"count": {"$ref": "#/$defs/count"}},
            "required": ["count"],
            "additionalProperties": False,
            "$defs": {"count": {"type": "integer"}},
        },
    ),
    ToolSpelling("stop", {"type": "object"}),
)
CALL = '<tool_call>\n{"name": "find", "arguments": {"count": 12}}\n</tool_call>'
WRONG_CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "find", "arguments": {"count": "12"}}\n</tool_call>',
    '<tool_call>\n{"name": "find", "arguments": {"count": 12}}',
)


def answer(
    vocabulary: Vocabulary,
    choice: Choice = "auto",
    *,
    parallel: bool = True,
    thought: ReasoningMarks | None = None,
    is_open: bool = False,
    budget: int | None = None,
    content: str | None = None,
) -> str:
    return answer_grammar(
        vocabulary.spelling,
        thought=thought,
        is_open=is_open,
        budget=budget,
        form=Hermes(),
        tools=TOOLS,
        choice=choice,
        parallel=parallel,
        content=content,
    )


@pytest.fixture(scope="module", params=["tokens", "texts"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    own = (THINK.start, THINK.end, *Hermes.markers) if request.param == "tokens" else ()
    return Vocabulary(write_toy_model(tmp_path_factory.mktemp("toy") / "model"), own)


def test_added_tokens_are_text_if_the_library_takes_them_for_it(tmp_path: Path) -> None:
    path = write_toy_model(tmp_path / "model") / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["<think>", "[CALL]"])
    tokenizer.add_special_tokens(["[ANSWER]"])
    tokenizer.save(str(path))
    matcher = LLMatcher(LLTokenizer(str(path), eos_token=[END]), "start: /.*/")
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    spelling = Tokenizer(path.parent).vocabulary.spelling
    for text, is_token in (("<think>", True), ("[CALL]", False), ("[ANSWER]", True)):
        token = tokenizer.token_to_id(text)
        is_text = bool(mask[token >> 3] >> (token & 7) & 1)
        assert (spelling.is_token(text), is_text) == (is_token, not is_token), text


@pytest.mark.parametrize("prefix", ["", "<think>\nso\n</think>\n\n"])
def test_the_choice_says_which_calls_there_may_be(vocabulary: Vocabulary, prefix: str) -> None:
    texts = {"text": "Hé <b> 😀", "call": CALL, "both": f"so: {CALL}", "two": f"{CALL}\n{CALL}"}
    expected = {
        ("none", True): {"text"},
        ("auto", True): {"text", "call", "both", "two"},
        ("auto", False): {"text", "call", "both"},
        ("required", True): {"call", "two"},
        ("required", False): {"call"},
    }
    for (choice, parallel), allowed in expected.items():
        grammar = answer(vocabulary, choice, parallel=parallel, thought=THINK)  # type: ignore[arg-type]
        found = {name for name, text in texts.items() if vocabulary.allows(grammar, prefix.strip("\n") + text)}
        assert found == allowed, (choice, parallel)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_call_that_has_begun_is_one_of_the_tools_with_valid_arguments(
    vocabulary: Vocabulary, choice: Choice, call: str
) -> None:
    assert not vocabulary.allows(answer(vocabulary, choice), call)


def test_content_in_a_format_excludes_no_calls(vocabulary: Vocabulary) -> None:
    grammar = answer(vocabulary, "auto", content='%json {"type": "integer"}', thought=THINK)
    assert [vocabulary.allows(grammar, text) for text in ("12", CALL, "twelve", "<think>a</think>12")] == [
        True,
        True,
        False,
        True,
    ]


def test_line_breaks_may_come_between_reasoning_and_what_has_a_form(vocabulary: Vocabulary) -> None:
    contents = ('%json {"type": "integer"}', '"12"', "/1[0-9]/")
    for content, choice in (*((each, "auto") for each in contents), (contents[0], "none"), (None, "required")):
        grammar = answer(vocabulary, choice, content=content, thought=THINK)  # type: ignore[arg-type]
        rest = CALL if content is None else "12"
        allowed = [
            vocabulary.allows(grammar, f"<think>a</think>{space}{rest}") for space in ("", "\n\n", " \n", "\n" * 9)
        ]
        assert allowed == [True, True, True, False], (content, choice)


def test_the_arguments_of_a_call_may_come_before_its_name(vocabulary: Vocabulary) -> None:
    call = '<tool_call>\n{"arguments": {"count": 12}, "name": "%s"}\n</tool_call>'
    for choice in ("auto", "required"):
        grammar = answer(vocabulary, choice)  # type: ignore[arg-type]
        assert [vocabulary.allows(grammar, call % name) for name in ("find", "look")] == [True, False]
        assert not vocabulary.allows(grammar, call.replace("12", '"a"') % "find")


def test_the_end_of_a_call_may_stand_in_a_text_if_other_tokens_spell_it(vocabulary: Vocabulary) -> None:
    tools = [ToolSpelling("say", {"type": "object", "properties": {"text": {"type": "string"}}})]
    grammar = answer_grammar(
        vocabulary.spelling,
        thought=None,
        is_open=False,
        budget=None,
        form=Hermes(),
        tools=tools,
        choice="required",
        parallel=False,
        content=None,
    )
    call = '<tool_call>\n{"name": "say", "arguments": {"text": "a %s b"}}\n</tool_call>'
    assert vocabulary.allows(grammar, call % r"\u003c/tool_call>")
    # The token of the marker is the end of the call alone, because it is no text for the library.
    assert vocabulary.allows(grammar, call % "</tool_call>") is not vocabulary.spelling.is_token("</tool_call>")


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_within_its_budget(vocabulary: Vocabulary, budget: int, choice: Choice) -> None:
    rest = f"</think>{'done' if choice == 'none' else CALL}"
    for start in ("", "<think>"):
        grammar = answer(vocabulary, choice, thought=THINK, is_open=not start, budget=budget)
        assert vocabulary.allows(grammar, start + "x" * budget + rest)
        assert not vocabulary.allows(grammar, start + "x" * (budget + 1) + rest)
        assert not vocabulary.allows(grammar, start + "x" * budget)


def test_reasoning_has_one_budget(vocabulary: Vocabulary) -> None:
    grammar = answer(vocabulary, "auto", thought=THINK, budget=2)
    assert vocabulary.allows(grammar, f"<think>xx</think>so {CALL}")
    for text in ("so <think>xxx</think>", "<think>xx</think><think>x</think>", f"<think>xx</think>{CALL}<think>"):
        assert not vocabulary.allows(grammar, text)


def test_a_budget_may_end_within_a_character(vocabulary: Vocabulary) -> None:
    grammar = answer(vocabulary, "none", thought=THINK, is_open=True, budget=2)
    assert not vocabulary.allows(grammar, "xé</think>")
    assert vocabulary.allows(grammar, "é</think>é")
