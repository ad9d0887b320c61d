"""All forms of tool calls: what a form writes, its parser reads and its grammar allows, however it is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import assume, given, settings
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
from paceline.services.gateway.planning.answers.form import ChannelForm, ReasoningMarks, ToolForm
from paceline.services.gateway.planning.answers.grammar import Choice, answer_grammar
from paceline.services.gateway.planning.answers.registry import REASONING_FORMS, TOOL_FORMS
from tests.services.gateway.planning.answers.pieces import CALLS, PLACES, TEXT, cut_at, parse
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import write_toy_model

Calls: TypeAlias = list[tuple[str, dict[str, Any]]]

THINK = REASONING_FORMS["think"]
THOUGHT = f"{THINK.start}\nso\n{THINK.end}\n\n"
FORMS = [form() for form in dict.fromkeys(TOOL_FORMS.values())]
few = settings(max_examples=settings().max_examples // 2)
"""For cases in which a grammar is compiled."""

TOOLS = (
    ToolSpelling(
        "find",
        {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "minimum": 3},
                "exact": {"type": "boolean"},
                "unit": {"enum": ["m", "km", None]},
                "tree": {"$ref": "#/$defs/tree"},
            },
            "required": ["count"],
            "additionalProperties": False,
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                }
            },
        },
    ),
    ToolSpelling("stop", {"type": "object"}),
)
RIGHT: list[Calls] = [
    [("find", {"count": 3})],
    [("find", {"count": 12, "exact": True, "unit": "km", "tree": {"below": [{"below": []}, {"below": [{}]}]}})],
    [("find", {"count": 12, "unit": None}), ("stop", {}), ("stop", {"any": [{"a": "b"}, None, False]})],
]
WRONG: list[Calls] = [
    [("look", {"count": 3})],
    [("find", {})],
    [("find", {"count": 2})],
    [("find", {"count": 3, "exact": "yes"})],
    [("find", {"count": 3, "unit": "mile"})],
    [("find", {"count": 3, "tree": {"below": [{"below": 1}]}})],
    [("find", {"count": 3, "other": 1})],
    [("find", {"count": 3}), ("look", {})],
]

UNREADABLE = ('{"name": "Ada", "age": 36}', '{"age": {"a": "b"}}', '{"name": "f" so', "[f(1)]", "[f(x, a='b')]")
"""Texts that begin as calls of the tool f do, and are none."""


def write(form: ToolForm, calls: Calls, ascii_only: bool = False) -> str:
    return form.write_all([(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls])


def triggered(form: ToolForm, calls: Calls) -> str:
    """Return calls as the form writes them, after its trigger."""
    written = write(form, calls)
    return written if written.startswith(form.triggers) else form.trigger + written


def exact(arguments: str) -> Any:
    """Return arguments as a value whose numbers are the text that was written."""
    return json.loads(arguments, parse_int=str, parse_float=str)


def tools_for(calls: Calls) -> list[ToolSpelling]:
    """Return tools that allow these calls; of several calls with one name, the last one."""
    return [ToolSpelling(name, schema_of(arguments)) for name, arguments in dict(calls).items()]


def schema_of(value: Any) -> dict[str, Any]:
    """Return a schema that allows a value, and little else."""
    match value:
        case None:
            return {"type": "null"}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": value}
        case float():
            return {"type": ["number", "string"]}
        case str():
            return {"type": "string"} if len(value) % 2 else {"enum": ["", value]}
        case list():
            return {"type": "array", "items": {"anyOf": [schema_of(item) for item in value]} if value else {}}
        case _:
            properties = {name: schema_of(item) for name, item in value.items()}
            return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}


def without_ids(parts: list[Part]) -> list[Part]:
    """Return the parts with the same id for all calls, because Mistral's are random."""
    return [CallBegin(part.index, "id", part.name) if isinstance(part, CallBegin) else part for part in parts]


def thought_of(form: ToolForm) -> ReasoningMarks:
    return form.thought if isinstance(form, ChannelForm) else THINK


def markers_of(form: ToolForm) -> tuple[str, ...]:
    return (*form.markers, thought_of(form).start, thought_of(form).end)


def plain(form: ToolForm, text: str) -> str:
    """Return a text without the characters with which markers and calls begin."""
    return "".join(character for character in text if character not in "<[{" + "".join(m[0] for m in form.markers))


def vocabulary_of(form: ToolForm) -> list[str]:
    """Return texts of markers, halves of markers, and what stands between them."""
    halves = [half for marker in markers_of(form) for half in (marker[:-1], marker[1:])]
    others = ["{", "}", "[", "]", "(", ")", '"name"', "name", ":", "=", '"f"', "f", ",", ";", "'", "\\", "x", " ", "\n"]
    begun = [form.write("f", '{"a": 1}')[:-1], form.write("f", '{"a": "b"}')]
    return [*markers_of(form), *halves, *others, *begun, *UNREADABLE]


# Each example is tried with all forms, because to make an example takes longer than to parse it.


@given(PLACES, TEXT, TEXT, CALLS, st.booleans())
def test_what_a_form_writes_is_read_without_its_markers(
    places: list[int], any_thought: str, any_content: str, calls: Calls, ascii_only: bool
) -> None:
    calls = [*dict(calls).items()]  # a tool has one schema, which the values of two calls may not both fit
    for form in FORMS:
        written = write(form, calls, ascii_only)
        thought, content = plain(form, any_thought).strip(), plain(form, any_content).strip()
        if not written.startswith(form.triggers or "\0"):
            content = ""  # calls are whole answers
        marks = thought_of(form)
        text = f"{marks.start}{thought}{marks.end}{content}{written}"
        parts = parse(cut_at(text, places), form, marks, tools=tools_for(calls))
        before = [*([Reasoning(thought)] if thought else []), *([Content(content)] if content else [])]
        assert parts[: len(before)] == before, form.name
        assert all(isinstance(part, CallBegin | CallArguments) for part in parts[len(before) :]), form.name
        read = [(call.name, exact(call.arguments)) for call in calls_of(parts)]
        assert read == [(name, exact(json.dumps(arguments))) for name, arguments in calls], form.name
        begun = [part.index for part in parts if isinstance(part, CallBegin)]
        assert begun == sorted(begun), form.name
        assert [part.index for part in parts[len(before) :]] == sorted([*begun, *begun]), form.name


@given(PLACES, TEXT, CALLS)
def test_a_call_ends_reasoning_that_has_no_end(places: list[int], any_thought: str, calls: Calls) -> None:
    calls = [*dict(calls).items()]
    for form in (form for form in FORMS if form.triggers):
        thought, written = plain(form, any_thought).strip(), triggered(form, calls)
        parts = parse(cut_at(f"{THINK.start}{thought}\n{written}", places), form, THINK, tools=tools_for(calls))
        before = [Reasoning(thought)] if thought else []
        assert parts[: len(before)] == before, form.name
        assert all(isinstance(part, CallBegin | CallArguments) for part in parts[len(before) :]), form.name
        read = [(call.name, exact(call.arguments)) for call in calls_of(parts)]
        assert read == [(name, exact(json.dumps(arguments))) for name, arguments in calls], form.name


@given(PLACES, CALLS, st.integers(0, 400))
def test_an_answer_may_be_cut_off_anywhere(places: list[int], calls: Calls, place: int) -> None:
    tools = tools_for(calls)
    for form in FORMS:
        written = write(form, calls)
        end = place % (len(written) + 1)
        parts = without_ids(parse([written[:end]], form, thought_of(form), tools=tools))
        in_pieces = parse(cut_at(written[:end], places), form, thought_of(form), tools=tools)
        assert without_ids(in_pieces) == parts, form.name
        whole = calls_of(without_ids(parse([written], form, thought_of(form), tools=tools)))
        for number, (call, intended) in enumerate(zip(calls_of(parts), whole), 1):
            assert call.name == intended.name, form.name
            assert intended.arguments.startswith(call.arguments), form.name
            assert number == len(calls_of(parts)) or call == intended, form.name
        assert not any(isinstance(part, Reasoning) for part in parts), form.name
        if written.startswith(form.triggers or "\0"):
            cut_off = parse([written[:end]], form, thought_of(form), tools=tools, is_cut_off=True)
            assert not any(isinstance(part, Content) for part in cut_off), form.name


@given(PLACES, st.lists(st.integers(0, 999), max_size=16))
def test_no_answer_leaks_a_marker_or_depends_on_its_cuts(places: list[int], choices: list[int]) -> None:
    tools = [ToolSpelling("f", {})]
    for form in FORMS:
        vocabulary, markers = vocabulary_of(form), markers_of(form)
        text = "".join(vocabulary[choice % len(vocabulary)] for choice in choices)
        parts = without_ids(parse([text], form, thought_of(form), tools=tools))
        in_pieces = parse(cut_at(text, places), form, thought_of(form), tools=tools)
        assert without_ids(in_pieces) == parts, form.name
        # A text such as "<</think>tool_call>" has a marker only without the one in its middle.
        rest = re.sub(rf"\s*({'|'.join(map(re.escape, sorted(markers, key=len, reverse=True)))})\s*", "", text)
        if not any(marker in rest for marker in markers):
            contents = [part.text for part in parts if isinstance(part, Content)]
            assert not any(marker in content for content in contents for marker in markers), form.name


@given(PLACES, st.sampled_from(UNREADABLE))
def test_what_cannot_be_read_as_a_call_is_content_however_it_is_cut(places: list[int], unreadable: str) -> None:
    assume("name" not in unreadable or "so" not in unreadable)  # a call has begun with its name
    for form in FORMS:
        for trigger in () if isinstance(form, ChannelForm) else ("", *form.triggers):
            parts = parse(cut_at(trigger + unreadable, places), form, THINK, tools=[ToolSpelling("f", {})])
            assert parts == [Content(unreadable)], form.name


@pytest.fixture(scope="module")
def vocabularies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Vocabulary]:
    """Two tokenizers: the form's markers are tokens of the one, and text for the other."""
    folder = tmp_path_factory.mktemp("toy")
    return [Vocabulary(write_toy_model(folder / str(len(own))), own) for own in (request.param, ())]


every_vocabulary = pytest.mark.parametrize(
    ("form", "vocabularies"),
    [
        pytest.param(form, markers_of(form), id=form.name)
        for form in FORMS
        if not isinstance(form, ChannelForm)  # such a form makes the grammar of the whole answer, and has its own tests
    ],
    indirect=["vocabularies"],
)


def grammar(
    vocabulary: Vocabulary,
    form: ToolForm,
    tools: Sequence[ToolSpelling],
    choice: Choice,
    parallel: bool = True,
    content: str | None = None,
    budget: int | None = None,
) -> str:
    return answer_grammar(
        vocabulary.spelling,
        thought=THINK,
        is_open=False,
        budget=budget,
        form=form,
        tools=tools,
        choice=choice,
        parallel=parallel,
        content=content,
    )


@every_vocabulary
@few
@given(CALLS, st.sampled_from(["auto", "required"]), st.booleans())
def test_the_grammar_allows_what_the_form_writes_and_no_other_tools(
    form: ToolForm, vocabularies: list[Vocabulary], calls: Calls, choice: Choice, thinks: bool
) -> None:
    calls = [*dict(calls).items()]
    tools = tools_for(calls)
    other = f"{calls[0][0]}_"
    assume(other not in dict(calls))
    # Not the text of a marker, which is a token of its own; nor a character that the library's JSON does not have.
    assume(not any(text in json.dumps(calls, ensure_ascii=False) for text in (*markers_of(form), "\x7f")))
    thought = f"{THINK.start}so{THINK.end}" if thinks else ""
    for vocabulary in vocabularies:
        rules = grammar(vocabulary, form, tools, choice)
        assert vocabulary.allows(rules, thought + write(form, calls))
        assert not vocabulary.allows(rules, thought + write(form, [*calls[1:], (other, calls[0][1])]))


@every_vocabulary
def test_calls_keep_to_the_schemas_of_their_tools(form: ToolForm, vocabularies: list[Vocabulary]) -> None:
    for vocabulary in vocabularies:
        for choice in ("auto", "required"):
            rules = grammar(vocabulary, form, TOOLS, choice)
            assert [calls for calls in [*RIGHT, *WRONG] if vocabulary.allows(rules, write(form, calls))] == RIGHT


@every_vocabulary
def test_the_choice_says_what_there_may_be(form: ToolForm, vocabularies: list[Vocabulary]) -> None:
    one, two = write(form, RIGHT[0]), write(form, RIGHT[2])
    texts = {"text": 'so: <b> {"n": 1}', "json": '{"n": [1]}', "one": one, "two": two}
    for vocabulary in vocabularies:
        for choice, parallel, allowed in (
            ("none", True, {"text", "json"}),
            ("auto", True, {"text", "json", "one", "two"}),
            ("auto", False, {"text", "json", "one"}),
            ("required", True, {"one", "two"}),
            ("required", False, {"one"}),
        ):
            rules = grammar(vocabulary, form, TOOLS, choice, parallel)
            assert {name for name, text in texts.items() if vocabulary.allows(rules, text)} == allowed


@every_vocabulary
def test_content_in_a_format_excludes_no_calls(form: ToolForm, vocabularies: list[Vocabulary]) -> None:
    properties = {"name": {"type": "string"}, "n": {"type": "array"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    call = write(form, RIGHT[0])
    texts = ('{"name": "x"}', '{\n "n": [1]}', call, "so", call.replace("find", "look"))
    for vocabulary in vocabularies:
        rules = grammar(vocabulary, form, TOOLS, "auto", content=f"%json {json.dumps(schema)}")
        assert [text for text in texts if vocabulary.allows(rules, text)] == [*texts[:3]]


@every_vocabulary
def test_reasoning_ends_with_a_call_or_with_the_answer(form: ToolForm, vocabularies: list[Vocabulary]) -> None:
    one, two = (f"<think>so {triggered(form, calls)}" for calls in (RIGHT[0], RIGHT[2]))
    texts = {"end": "<think>so ", "empty": "<think>", "one": one, "two": two, "wrong": one.replace("find", "look")}
    called = {"one", "two"} if form.triggers else {"one", "two", "wrong"}  # calls without a trigger are reasoning here
    expected: list[tuple[Choice, bool, str | None, set[str]]] = [
        ("none", True, None, set() if form.triggers else called),
        ("auto", True, None, called),
        ("auto", False, None, called - {"two"} if form.triggers else called),
        ("required", True, None, called),
        ("required", False, None, called - {"two"} if form.triggers else called),
        ("auto", True, '%json {"type": "integer"}', called),
    ]
    for vocabulary in vocabularies:
        for choice, parallel, content, allowed in expected:
            rules = grammar(vocabulary, form, TOOLS, choice, parallel, content)
            found = {name for name, text in texts.items() if vocabulary.allows(rules, text)}
            assert found == allowed | {"end", "empty"}, (choice, parallel, content)


@every_vocabulary
def test_a_budget_that_is_spent_ends_with_the_marker_alone(form: ToolForm, vocabularies: list[Vocabulary]) -> None:
    call = triggered(form, RIGHT[0]) if form.triggers else ""
    for vocabulary in vocabularies:
        for budget in (0, 1, 2, 64):
            rules = grammar(vocabulary, form, TOOLS, "auto", budget=budget)
            spent = "<think>" + "x" * budget
            assert not vocabulary.allows(rules, spent)
            assert not vocabulary.allows(rules, spent + call)
            assert vocabulary.allows(rules, f"{spent}</think>{call}")
        assert vocabulary.allows(rules, "<think>so ")
        assert vocabulary.allows(rules, f"<think>so {call}")
