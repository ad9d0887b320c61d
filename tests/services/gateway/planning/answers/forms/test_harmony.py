"""Answers in Harmony: messages in channels, some of them with a recipient."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.services.gateway.planning.answers.answer import (
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    calls_of,
)
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.forms.harmony import Harmony
from paceline.services.gateway.planning.answers.grammar import Choice, answer_grammar
from paceline.services.gateway.planning.answers.parser import AnswerParser, read_answer
from tests.services.gateway.planning.answers.forms.written import tool
from tests.services.gateway.planning.answers.pieces import ARGUMENTS, NAMES, TEXT, cut
from tests.services.gateway.planning.answers.pieces import parse as parse_parts
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import write_toy_model

FORM = Harmony()
ANALYSIS = "<|channel|>analysis<|message|>so<|end|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"
FINAL = "<|channel|>final<|message|>42"
CALL = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"count": 12}'
ROLE_CALL = ' to=functions.find<|channel|>commentary <|constrain|>json<|message|>{"count": 12}'
START = "<|start|>assistant"
FOUND = [CallBegin(0, "id", "find"), CallArguments(0, '{"count": 12}')]
WORDS = st.sampled_from(
    [*FORM.markers, "analysis", "final", " to=functions.f", "assistant", "json", "{", "}", '"', " ", "\n", "<|"]
)


def parse(text: str, *, is_open: bool = False, pieces: list[str] | None = None) -> list[Part]:
    return parse_parts([*text] if pieces is None else pieces, FORM, FORM.thought, is_open=is_open)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (FINAL, [Content("42")]),
        (ANALYSIS + START + FINAL + "<|return|>", [Reasoning("so"), Content("42")]),
        (ANALYSIS + START + CALL + "<|call|>", [Reasoning("so"), *FOUND]),
        (ROLE_CALL, FOUND),
        (ANALYSIS + START + ROLE_CALL, [Reasoning("so"), *FOUND]),
        (PREAMBLE + START + CALL, [Content("I look."), *FOUND]),
        (ANALYSIS + START + ANALYSIS + START + FINAL, [Reasoning("soso"), Content("42")]),
        ('<|channel|>analysis to=functions.find code<|message|>{"count": 12}<|call|>', FOUND),
        ('<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{"count": 12}', FOUND),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", [CallBegin(0, "id", "f"), CallArguments(0, "{}")]),
        ("<|channel|>commentary to=functions.find<|message|>nothing<|call|>", [Content("nothing")]),
        ("<|channel|>analysis<|message|>so", [Reasoning("so")]),
        ("<|channel|>comm", []),
        (" plain <text> ", [Content(" plain <text> ")]),
        ("42<|end|>", [Content("42")]),
    ],
)  # fmt: skip
def test_messages_become_parts(text: str, parts: list[Part]) -> None:
    assert parse(text) == parse(text, pieces=[text]) == parts


def test_an_answer_may_begin_within_a_message() -> None:
    assert parse("so<|end|>" + START + FINAL, is_open=True) == [Reasoning("so"), Content("42")]


@given(st.data(), TEXT, TEXT, NAMES, ARGUMENTS)
def test_markers_within_texts_of_json_are_no_markers(
    data: st.DataObject, thought: str, marker: str, name: str, arguments: dict[str, object]
) -> None:
    thought = re.sub(r"[<>\s]", "", thought)
    arguments["text"] = f"{marker}<|call|>"
    text = f"<|channel|>analysis<|message|>{thought}<|end|>{START}" + FORM.write(name, json.dumps(arguments))
    parts = parse(text, pieces=data.draw(cut(text)))
    assert parts[:-2] == ([Reasoning(thought)] if thought else [])
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(parts)] == [(name, arguments)]


@given(st.data(), st.lists(WORDS))
def test_no_answer_leaks_a_marker_or_depends_on_its_cuts(data: st.DataObject, words: list[str]) -> None:
    text = "".join(words)
    parts = parse(text)
    assert parse(text, pieces=data.draw(cut(text))) == parts
    left = re.sub("|".join(map(re.escape, FORM.markers)), "", text)
    assume(not any(marker in left for marker in FORM.markers))
    assert not any(marker in part.text for part in parts if isinstance(part, Content) for marker in FORM.markers)


def test_tokens_of_all_reasoning_are_counted() -> None:
    parser = AnswerParser(lambda answer: read_answer(answer, FORM.thought, FORM, False))
    thought = ("<|channel|>", "analysis", "<|message|>", "a", " b", "<|end|>")
    for token in (*thought, "<|start|>", "assistant", *thought, "<|start|>", "assistant", *FINAL):
        parser.push(token)
    parser.finish()
    assert parser.reasoning_tokens == 4


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = write_toy_model(tmp_path_factory.mktemp("toy") / "model")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|end|>", "<|return|>"))  # the model's own token for the end of an answer
    return Vocabulary(folder, FORM.markers)


def grammar(
    vocabulary: Vocabulary,
    choice: Choice,
    *,
    tools: tuple[ToolSpelling, ...] = (tool({"count": {"type": "integer"}}, ["count"]),),
    is_open: bool = False,
    budget: int | None = None,
    content: str | None = None,
) -> str:
    return answer_grammar(
        vocabulary.spelling,
        thought=FORM.thought,
        is_open=is_open,
        budget=budget,
        form=FORM,
        tools=tools,
        choice=choice,
        parallel=True,
        content=content,
    )


def test_the_choice_says_which_messages_there_may_be(vocabulary: Vocabulary) -> None:
    texts = {"final": FINAL, "call": CALL, "role": ROLE_CALL, "preamble": PREAMBLE + START + FINAL, "text": "42"}
    texts |= {"analysis": CALL.replace("commentary", "analysis"), "unfinished": FORM.thought.start + "so"}
    wrong = CALL.replace("12", '"12"'), CALL.replace("find", "look"), CALL + "<|end|>" + START + FINAL
    expected: dict[Choice, set[str]] = {
        "none": {"final", "preamble", "unfinished"},
        "auto": {"final", "call", "role", "preamble", "analysis", "unfinished"},
        "required": {"call", "role", "analysis", "unfinished"},
    }
    for choice, allowed in expected.items():
        for before in ("", ANALYSIS + START, ANALYSIS + START + ANALYSIS + START):
            made = grammar(vocabulary, choice)
            assert {name for name, text in texts.items() if vocabulary.allows(made, before + text)} == allowed
            assert not any(vocabulary.allows(made, before + text) for text in wrong)
    assert not vocabulary.allows(grammar(vocabulary, "auto", tools=()), CALL)


def test_a_format_holds_for_the_final_channel(vocabulary: Vocabulary) -> None:
    made = grammar(vocabulary, "auto", content='%json {"type": "integer"}')
    good = [FINAL, CALL, ANALYSIS + START + FINAL]
    bad = [FINAL.replace("42", "x"), "42", PREAMBLE + START + FINAL]
    assert [text for text in (*good, *bad) if vocabulary.allows(made, text)] == good


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("last", [FINAL, CALL])
def test_reasoning_ends_within_its_budget(vocabulary: Vocabulary, budget: int, last: str) -> None:
    made = grammar(vocabulary, "auto", budget=budget)
    begin, end = FORM.thought.start, f"<|end|>{START}{last}"
    assert vocabulary.allows(made, last)
    assert vocabulary.allows(made, begin + "x" * budget + end)
    assert not vocabulary.allows(made, begin + "x" * (budget + 1) + end)
    assert not vocabulary.allows(made, begin + end.replace(last, begin + "x" + end))
    assert vocabulary.allows(grammar(vocabulary, "auto", budget=budget, is_open=True), "x" * budget + end)
