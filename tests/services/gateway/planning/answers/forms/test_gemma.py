"""Calls of FunctionGemma and Gemma 4: bare keys, and texts between markers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.services.gateway.planning.answers.answer import CallArguments, CallBegin, Content, Reasoning, calls_of
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.forms.gemma import FunctionGemma, Gemma4Form
from paceline.services.gateway.planning.answers.grammar import answer_grammar
from paceline.services.gateway.planning.answers.parser import AnswerParser, read_answer
from paceline.services.gateway.planning.answers.registry import REASONING_FORMS
from tests.services.gateway.planning.answers.forms.written import allowed, tool
from tests.services.gateway.planning.answers.pieces import parse
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import write_toy_model

FORMS = (FunctionGemma(), Gemma4Form())
THOUGHT = REASONING_FORMS["gemma4"]
ARGUMENTS = '{"text": "rain", "limits": {"days": 3, "wet": true}, "tags": ["a", "b"]}'


def with_marks(form: FunctionGemma, values: str) -> str:
    """Return a call with these values, in which single quotes stand for the markers of texts."""
    return f"{form.trigger}call:find{values}{form.end}".replace("'", form.quote)


def test_the_documented_forms() -> None:
    values = {form.name: form.write("find", ARGUMENTS) for form in FORMS}
    assert values == {
        "functiongemma": "<start_function_call>call:find{text:<escape>rain<escape>,limits:{days:3,wet:true},"
        "tags:[<escape>a<escape>,<escape>b<escape>]}<end_function_call>",
        "gemma4": '<|tool_call>call:find{text:<|"|>rain<|"|>,limits:{days:3,wet:true},'
        'tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>',
    }
    for form in FORMS:
        assert parse([*values[form.name]], form) == [CallBegin(0, "id", "find"), CallArguments(0, ARGUMENTS)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ("{}", "{}"),
        ("{n:108.0,m:1e5,o:-0}", '{"n": 108.0, "m": 1e5, "o": -0}'),
        ("{ a : 1 , b : [ 1 , [ ] ] , }", '{"a": 1, "b": [1, []]}'),
        ('{"a":"b\\n",\'c:d\':null}', '{"a": "b\\n", "c:d": null}'),
        ("{a:None,b:True,c:Paris}", '{"a": null, "b": true, "c": "Paris"}'),
        ("{a:'{b:\"]',c:'\n'}", '{"a": "{b:\\"]", "c": "\\n"}'),
        ("{a:}", '{"a": null}'),
        ("{a:[1}", '{"a": [1]}'),
    ],
)
def test_what_models_write_becomes_json(form: FunctionGemma, values: str, arguments: str) -> None:
    text = with_marks(form, values)
    for pieces in ([text], [*text]):
        assert calls_of(parse(pieces, form))[0].arguments.startswith(arguments)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_call_that_breaks_off_is_valid_json(form: FunctionGemma) -> None:
    parts = parse([*with_marks(form, "{a:[1,{b}")], form)
    assert parts[:2] == [CallBegin(0, "id", "find"), CallArguments(0, '{"a": [1, {}]}')]
    assert parts[2:] == [Content("}")]


def test_what_is_no_call_is_content() -> None:
    assert parse([*"<|tool_call>say hi<tool_call|>"], Gemma4Form()) == [Content("say hi")]


def test_a_number_comes_when_it_is_complete() -> None:
    parser = AnswerParser(lambda answer: read_answer(answer, None, Gemma4Form(), False), lambda: "id")
    pieces = {
        '<|tool_call>call:f{a:<|"|>x y': '{"a": "x y',
        ' z<|"|>,n:108': ' z"',
        ".": "",
        "0": "",
        ",": ', "n": 108.0',
    }
    assert {piece: "".join(getattr(part, "text", "") for part in parser.push(piece)) for piece in pieces} == pieces


def test_reasoning_is_the_channel_without_its_name() -> None:
    text = "<|channel>thought\nso\n<channel|>" + Gemma4Form().write("f", "{}") + Gemma4Form().write("g", "{}")
    parts = parse([*text], Gemma4Form(), THOUGHT)
    assert parts[0] == Reasoning("so")
    assert [call.name for call in calls_of(parts)] == ["f", "g"]
    assert parse([*"so<channel|>42"], Gemma4Form(), THOUGHT, is_open=True) == [Reasoning("so"), Content("42")]
    assert parse([*"<|channel>so<channel|>42"], None, THOUGHT) == [Reasoning("so"), Content("42")]


def test_the_name_of_the_channel_is_not_counted_as_reasoning() -> None:
    parser = AnswerParser(lambda answer: read_answer(answer, THOUGHT, None, False))
    for token in ("<|channel>", "thought", "\n", "a", " b", "<channel|>", "c"):
        parser.push(token)
    assert parser.reasoning_tokens == 2


@pytest.fixture(scope="module", params=["tokens", "texts"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    own = [marker for form in FORMS for marker in form.markers] if request.param == "tokens" else ()
    return Vocabulary(write_toy_model(tmp_path_factory.mktemp("toy") / "model"), own)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_grammar_holds_values_to_the_schema(vocabulary: Vocabulary, form: FunctionGemma) -> None:
    node = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    definitions = {"node": {"type": "object", "properties": {"next": node}, "required": ["next"]}}
    find = tool(
        {
            "mode": {"enum": ["near", 3, None]},
            "text": {"type": "string", "maxLength": 5},
            "count": {"type": ["integer", "null"], "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 2},
            "limits": {"type": "object", "additionalProperties": {"type": "integer"}},
            "node": node,
            "any": {},
        },
        ["text"],
        **{"$defs": definitions},
    )
    good = [
        "{text:'rain'}",
        "{mode:'near',text:'',count:3}",
        "{mode:null,text:'\n\"}é',count:null,tags:['a','bc']}",
        "{text:'x',tags:[],limits:{a:1,b:2},node:{next:{next:null}},any:{k:[1,'x',{}]}}",
        "{text:'x',limits:{},any:'y'}",
    ]
    bad = [
        "{}",
        "{count:1}",
        "{text:'rainbow'}",
        "{text:rain}",
        "{text:'x',count:-1}",
        "{text:'x',tags:['A']}",
        "{text:'x',tags:['a','b','c']}",
        "{text:'x',limits:{a:'1'}}",
        "{text:'x',node:{}}",
        "{text:'x',mode:'near'}",
        "{text:'x',other:1}",
        "{text:'x',}",
    ]
    texts = [with_marks(form, values) for values in (*good, *bad)]
    assert allowed(vocabulary, form, [find], texts) == texts[: len(good)]


def test_an_array_has_as_many_items_as_its_schema_says(vocabulary: Vocabulary) -> None:
    form = Gemma4Form()
    texts = [form.write("find", json.dumps({"a": ["x"] * count})) for count in range(4)]
    for bounds, counts in (
        ({"maxItems": 0}, [0]),
        ({"maxItems": 1}, [0, 1]),
        ({"minItems": 1, "maxItems": 1}, [1]),
        ({"minItems": 2, "maxItems": 2}, [2]),
        ({"minItems": 2}, [2, 3]),
    ):
        find = tool({"a": {"type": "array", "items": {"type": "string"}, **bounds}}, ["a"])
        assert allowed(vocabulary, form, [find], texts) == [texts[count] for count in counts]


def test_a_tool_without_properties_takes_any(vocabulary: Vocabulary) -> None:
    texts = [Gemma4Form().write("stop", json.dumps(arguments)) for arguments in ({}, {"a": 1, "b": ["x"]})]
    closed = ToolSpelling("stop", {"type": "object", "additionalProperties": False})
    assert allowed(vocabulary, Gemma4Form(), [ToolSpelling("stop", {"type": "object"})], texts) == texts
    assert allowed(vocabulary, Gemma4Form(), [closed], texts) == texts[:1]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_name_of_the_channel_is_no_part_of_a_budget(tmp_path: Path, budget: int) -> None:
    vocabulary = Vocabulary(write_toy_model(tmp_path / "model"), (THOUGHT.start, THOUGHT.end, *Gemma4Form.markers))
    grammar = answer_grammar(
        vocabulary.spelling,
        thought=THOUGHT,
        is_open=False,
        budget=budget,
        form=Gemma4Form(),
        tools=[tool({})],
        choice="auto",
        parallel=True,
        content=None,
    )
    begin, end = "<|channel>thought\n", "<channel|>" + Gemma4Form().write("find", "{}")
    assert vocabulary.allows(grammar, begin + "x" * budget + end)
    assert not vocabulary.allows(grammar, begin + "x" * (budget + 1) + end)
    assert not vocabulary.allows(grammar, "<|channel>" + end)
