"""All that the grammar of a form allows is read as calls whose arguments follow the schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from paceline.services.gateway.planning.answers.answer import Content, calls_of
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.form import ChannelForm
from paceline.services.gateway.planning.answers.grammar import answer_grammar
from paceline.services.gateway.planning.answers.parser import AnswerParser, read_answer
from paceline.services.gateway.planning.answers.registry import TOOL_FORMS
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import write_toy_model

SPACED = {"whitespace_pattern": r"[\x20\x0A]{1,4}"}
NODE = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
SCHEMAS: dict[str, Mapping[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "mode": {"enum": ["near", 3, None]},
            "text": {"type": "string", "maxLength": 5},
            "count": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            "share": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "maxItems": 2},
            "limits": {"type": "object", "additionalProperties": {"type": "integer"}},
            "node": NODE,
            "where": {"type": ["string", "null"]},
            "any": {},
        },
        "required": ["text", "share"],
        "additionalProperties": False,
        "$defs": {"node": {"type": "object", "properties": {"next": NODE}, "additionalProperties": False}},
    },
    "stop": {"type": "object"},
}
TOOLS = [ToolSpelling(name, {**schema, "x-guidance": SPACED}) for name, schema in SCHEMAS.items()]


# Models with channels have their markers as tokens. Others may have them as text.
CASES = [(name, True) for name in sorted(TOOL_FORMS)]
CASES += [(name, False) for name in sorted(TOOL_FORMS) if not issubclass(TOOL_FORMS[name], ChannelForm)]


@pytest.mark.parametrize(("name", "has_tokens"), CASES)
def test_what_a_grammar_allows_is_read_as_valid_calls(tmp_path: Path, name: str, has_tokens: bool) -> None:
    form = TOOL_FORMS[name]()
    thought = form.thought if isinstance(form, ChannelForm) else None
    folder = write_toy_model(tmp_path / "model")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|end|>", "<|eos|>"))  # a name that is no marker of a form
    vocabulary = Vocabulary(folder, form.markers if has_tokens else ())
    grammar = answer_grammar(
        vocabulary.spelling,
        thought=thought,
        is_open=False,
        budget=0,  # reasoning may end the answer, and then there is no call
        form=form,
        tools=TOOLS,
        choice="required",
        parallel=False,
        content=None,
    )
    random = Random(name)
    answers = [vocabulary.random_answer(grammar, random) for _ in range(12)]
    assert any(answers)
    for answer in filter(None, answers):
        parser = AnswerParser(lambda answer: read_answer(answer, thought, form, False, form.argument_types(TOOLS)))
        parts = parser.push(answer) + parser.finish()
        calls = calls_of(parts)
        assert calls
        assert not any(isinstance(part, Content) for part in parts)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
