"""Calls of Qwen3-Coder: values have the types of the tool's schema."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.json_grammar.parameters import ArgumentTypes
from paceline.services.gateway.planning.answers.answer import (
    CallArguments,
    CallBegin,
    Content,
    Part,
    calls_of,
    join_parts,
)
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.forms.qwen3_coder import Qwen3Coder
from paceline.services.gateway.planning.answers.parser import AnswerParser, read_answer
from tests.services.gateway.planning.answers import pieces
from tests.services.gateway.planning.answers.forms.written import allowed, tool
from tests.services.gateway.planning.answers.pieces import TEXT, cut
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import write_toy_model

FORM = Qwen3Coder()
NODE = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
DEFS = {"$defs": {"node": {"type": "object", "properties": {"next": NODE}}}}
FIND = tool(
    {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "exact": {"type": "boolean"},
        "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "limits": {"type": "object"},
        "node": NODE,
        "mode": {"enum": ["1", "2"]},
        "any": {},
    },
    **DEFS,
)


def call(**values: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=find>\n{parameters}</function>\n</tool_call>"


def parse(pieces: list[str], tools: tuple[ToolSpelling, ...] = (FIND,)) -> list[Part]:
    types = FORM.argument_types(tools)
    parser = AnswerParser(lambda answer: read_answer(answer, None, FORM, False, types), lambda: "id")
    parts = [part for piece in pieces for part in parser.push(piece)]
    return join_parts(parts + parser.finish())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("text", "12", '"12"'),
        ("text", '"quoted"\n', r'"\"quoted\"\n"'),
        ("text", "", '""'),
        ("text", "a\n</parameter>\nb", r'"a\n</parameter>\nb"'),
        ("count", "12", "12"),
        ("count", "12.0", "12.0"),
        ("count", "twelve", '"twelve"'),
        ("share", "1e-7", "1e-7"),
        ("share", "None", "null"),
        ("exact", "True", "true"),
        ("where", "null", "null"),
        ("where", "12", '"12"'),
        ("limits", '{"days": 108.0}', '{"days": 108.0}'),
        ("node", '{"next": null}', '{"next": null}'),
        ("mode", "1", '"1"'),
        ("any", "12", "12"),
        ("any", "rain", '"rain"'),
        ("any", "NaN", '"NaN"'),
        ("unknown", "[1]", "[1]"),
    ],
)
def test_values_have_the_types_of_the_schema(name: str, value: str, expected: str) -> None:
    parts = [CallBegin(0, "id", "find"), CallArguments(0, f'{{"{name}": {expected}}}')]
    assert parse([*call(**{name: value})]) == parse([call(**{name: value})]) == parts


@given(st.data(), TEXT, st.integers(), st.dictionaries(TEXT, TEXT, max_size=2))
def test_typed_arguments_do_not_depend_on_cuts(
    data: st.DataObject, text: str, count: int, limits: dict[str, str]
) -> None:
    written = call(text=text, count=str(count), limits=json.dumps(limits).replace("<", "\\u003c"))
    arguments = calls_of(parse(data.draw(cut(written))))[0].arguments
    assert json.loads(arguments) == {"text": text, "count": count, "limits": limits}


def test_texts_come_as_they_are_written_and_numbers_when_they_are_complete() -> None:
    types = FORM.argument_types((FIND,))
    parser = AnswerParser(lambda answer: read_answer(answer, None, FORM, False, types), lambda: "id")
    pieces = {
        "<tool_call>\n<function=find>\n<parameter=text>\nit r": '{"text": "it r',
        "ains\n": "ains",
        "now\n</parameter>\n<parameter=count>\n1": '\\nnow", "count": ',
        "0": "",
        "\n</parameter>\n<parameter=": "10",
    }
    come = {piece: "".join(getattr(part, "text", "") for part in parser.push(piece)) for piece in pieces}
    assert come == pieces


LOOP = {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "not": {"$ref": "#/$defs/a"}, "$defs": LOOP},
        {"type": "object", "properties": {"a": {"type": "string"}}, "$id": "http://["},
        {"type": "object", "properties": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$defs": LOOP},
        {"type": "object", "properties": {"a": {"type": "string"}}, "maxProperties": 10**5000},
    ],
)
def test_a_schema_that_is_not_enforced_is_no_error_of_an_answer(schema: dict[str, object]) -> None:
    (found,) = calls_of(parse([call(a="12")], (ToolSpelling("find", schema),)))
    assert json.loads(found.arguments) == {"a": 12}


def test_schemas_are_read_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take a second, in which the event loop would write no other answer."""
    types = FORM.argument_types((FIND,))
    monkeypatch.setattr(ArgumentTypes, "__init__", None)
    monkeypatch.setattr(ArgumentTypes, "_of", None)
    parser = AnswerParser(lambda answer: read_answer(answer, None, FORM, False, types), lambda: "id")
    (found,) = calls_of(parser.push(call(text="12", other="12")))
    assert json.loads(found.arguments) == {"text": "12", "other": 12}


def test_schemas_are_read_once_however_often_a_tool_is_sent() -> None:
    assert FORM.argument_types((FIND,)) == FORM.argument_types((tool(FIND.parameters["properties"], **DEFS),))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=find>\n</function>", "{}"),
        ("<tool_call><function=find><parameter=count>1</parameter></function></tool_call>", '{"count": 1}'),
        ("<tool_call>\n<function=find>\n<parameter=count>\n1\n</parameter>\n</tool_call>", '{"count": 1}'),
    ],
)
def test_tags_may_be_missing(text: str, arguments: str) -> None:
    assert parse([*text]) == [CallBegin(0, "id", "find"), CallArguments(0, arguments)]


@pytest.mark.parametrize("text", ["<func", "\n<function=", "<function=find"])
def test_a_first_tag_that_is_cut_off_is_no_content(text: str) -> None:
    assert not pieces.parse([*text], FORM, is_cut_off=True)
    if "=" not in text:
        assert parse([*text]) == [Content(text)]


def test_what_is_no_call_is_content() -> None:
    assert parse([*"<tool_call>\n<func>\n</tool_call>"]) == [Content("\n<func>")]


@pytest.fixture(scope="module", params=["tokens", "texts"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    own = FORM.markers if request.param == "tokens" else ()
    return Vocabulary(write_toy_model(tmp_path_factory.mktemp("toy") / "model"), own)


def test_the_grammar_holds_values_to_the_schema(vocabulary: Vocabulary) -> None:
    good = [
        call(text="a\nb <c> é"),
        call(text="", count="-12"),
        call(text="x", share="null", exact="true"),
        call(text="x", limits='{"a": [1]}', node='{"next": {"next": null}}'),
        call(text="x", mode="2", any="y"),
    ]
    bad = [
        call(),
        call(count="1"),
        call(text="x", count="many"),
        call(text="x", exact="null"),
        call(text="x", mode="3"),
        call(text="x", node='{"next": 1}'),
        call(text="x", other="1"),
    ]
    tools = [ToolSpelling("find", {**FIND.parameters, "required": ["text"]})]
    assert allowed(vocabulary, FORM, tools, [*good, *bad]) == good


def test_a_tool_without_properties_takes_any(vocabulary: Vocabulary) -> None:
    texts = [FORM.write("stop", arguments) for arguments in ("{}", '{"a": 1, "b": "x\\ny"}')]
    assert allowed(vocabulary, FORM, [ToolSpelling("stop", {"type": "object"})], texts) == texts
