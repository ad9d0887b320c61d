"""Every way to request a structured answer gives one checked constraint."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.planning.answer_format import COMPACT, SPACED
from paceline.services.gateway.planning.constraints.content import constraint_of
from paceline.services.gateway.planning.constraints.fields import ConstraintFields
from tests.services.gateway.conftest import Stack
from tests.services.gateway.http.test_errors import error_of
from tests.services.gateway.toy_model import END

ENDS = frozenset({END})
POINT = {"type": "object", "properties": {"y": {"type": "integer"}, "x": {"type": "integer"}}, "required": ["x"]}


def wanted(**fields: Any) -> Constraint | None:
    return constraint_of(ConstraintFields(**fields), ENDS)


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema, **more}}


def test_saying_nothing_constrains_nothing() -> None:
    assert wanted() is None
    assert wanted(response_format={"type": "text"}) is None
    assert wanted(response_format=None, structured_outputs=None) is None


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": named(POINT, strict=True, description="where")}, POINT),
        ({"response_format": named(True)}, {}),
        ({"structured_outputs": {"json": POINT}}, POINT),
        ({"structured_outputs": {"json": json.dumps(POINT), "regex": None}}, POINT),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"guided_json": POINT}, POINT),
        ({"response_format": {"type": "text"}, "guided_json": json.dumps(POINT)}, POINT),
    ],
)
def test_schemas(fields: dict[str, Any], schema: dict[str, Any]) -> None:
    found = wanted(**fields)
    assert found is not None
    assert (found.kind, found.end_token_ids) == (ConstraintKind.JSON_SCHEMA, ENDS)
    # Compare text, because the order of properties must stay.
    assert json.dumps(json.loads(found.text)) == json.dumps({**schema, "x-guidance": SPACED})


def test_json_without_white_space() -> None:
    found = wanted(structured_outputs={"json": POINT, "disable_any_whitespace": True})
    assert found is not None
    assert json.loads(found.text)["x-guidance"] == COMPACT


def test_white_space_may_be_chosen() -> None:
    for fields in (
        {"structured_outputs": {"json": POINT, "whitespace_pattern": " ?"}},
        {"guided_json": POINT, "guided_whitespace_pattern": " ?"},
    ):
        found = wanted(**fields)
        assert found is not None
        assert json.loads(found.text)["x-guidance"] == {"whitespace_pattern": " ?"}


def test_structural_tags_come_in_three_forms() -> None:
    tag = {"begin": "<f=x>", "end": "</f>"}
    content = {"type": "json_schema", "json_schema": POINT}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"type": "tag", **tag, "content": content}]}
    newer = {"type": "structural_tag", "format": form}
    older = {"type": "structural_tag", "triggers": ["<f="], "structures": [{**tag, "schema": POINT}]}
    texts = {json.dumps(each) for each in (older, newer)}
    found = [wanted(response_format=each) for each in (older, newer)]
    found += [wanted(structured_outputs={"structural_tag": text}) for text in texts]
    assert len(set(found)) == 1
    assert found[0] is not None
    assert found[0].kind is ConstraintKind.ANSWER


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("regex", "a|b", (ConstraintKind.REGEX, "a|b")),
        ("choice", ["yes", "нет"], (ConstraintKind.CHOICE, '["yes", "нет"]')),
        ("grammar", 'start: "a"', (ConstraintKind.GRAMMAR, 'start: "a"')),
    ],
)
def test_other_kinds_by_both_names(name: str, value: Any, expected: tuple[ConstraintKind, str]) -> None:
    for fields in ({"structured_outputs": {name: value}}, {f"guided_{name}": value}):
        assert wanted(**fields) == Constraint(*expected, ENDS)


def nested(depth: int) -> dict[str, Any]:
    """Return a schema with this many objects, one in the other."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"additionalProperties": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "structural_tag"}}, "response_format", "either format, or structures and triggers"),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text", "max_tokens": 1}}},
        "response_format.format.max_tokens",
        "not permitted",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}},
        "response_format",
        "unclosed",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a name and a schema"),
    ({"response_format": named(None)}, "response_format.json_schema.schema", "schema is missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "required",
    ),
    ({"response_format": named({"type": "nonsense"})}, "response_format.json_schema.schema", "nonsense"),
    ({"response_format": named({"not": {}})}, "response_format.json_schema.schema", "no JSON fits"),
    (
        {"response_format": named({"x-guidance": {"item_separator": "1+"}})},
        "response_format.json_schema.schema",
        "x-guidance",
    ),
    ({"response_format": named(False)}, "response_format.json_schema.schema", "must be a JSON object"),
    ({"response_format": "json"}, "response_format", "a JSON object"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"json": '{"a":' * 5000 + "1" + "}" * 5000}}, "structured_outputs.json", "nested too deep"),
    ({"response_format": named(nested(600))}, None, "nested too deeply: JSON can have about 200 levels"),
    (
        {"response_format": named({"uniqueItems": True}, strict=True)},
        "response_format.json_schema.schema",
        "uniqueItems",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "json: not a JSON schema"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "valid"),
    ({"structured_outputs": {"json": "7"}}, "structured_outputs.json", "JSON object"),
    ({"structured_outputs": {"json": {"a": "\ud800"}}}, "structured_outputs.json", "surrogates"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex: .*unclosed"),
    ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex", "string"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "string"),
    ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar", "grammar: .*b"),
    ({"structured_outputs": {"grammar": "x" * 200_000}}, "structured_outputs.grammar", "128 KiB"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "type: Field required",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": "("}},
        "structured_outputs.json",
        "unclosed",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ?", "disable_any_whitespace": True}},
        "structured_outputs.whitespace_pattern",
        "only one",
    ),
    ({"structured_outputs": {"whitespace_pattern": " ?"}}, "structured_outputs", "needs one of"),
    (
        {"structured_outputs": {"allow_additional_properties": True, "disable_additional_properties": True}},
        "structured_outputs.allow_additional_properties",
        "only one",
    ),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json", "only one"),
    ({"structured_outputs": {"json": {}, "json_object": True}}, "structured_outputs.json", "only one"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "only one"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "only one"),
    ({"guided_json": {"type": "nonsense"}}, "guided_json", "nonsense"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "not supported"),
    ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [97]}, "allowed_token_ids", "only one"),
]


async def test_what_is_refused_names_its_field(stack: Stack) -> None:
    for fields, param, reason in REFUSED:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        response = await stack.http.post("/v1/chat/completions", content=content, headers=headers)
        error = error_of(response)
        assert (fields, error["param"]) == (fields, param)
        assert re.search(reason, error["message"], re.DOTALL), (fields, error["message"])
    assert stack.workers["decode-0"].calls == []


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"response_format": named({})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_what_a_worker_refuses_names_the_field_of_the_client(
    stack: Stack, fields: dict[str, Any], place: str
) -> None:
    stack.workers["decode-0"].refusal = ConstraintError("too large")
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    for stream in (False, True):
        error = error_of(await stack.post("/v1/chat/completions", **body, stream=stream))
        assert (error["param"], error["message"]) == (place, f"{place}: too large")


async def test_other_fields_that_a_worker_refuses_keep_their_names(stack: Stack) -> None:
    stack.workers["decode-0"].refusal = InvalidRequestError("no such token", "logit_bias")
    body = {"messages": [{"role": "user", "content": "x"}], "guided_regex": "a"}
    error = error_of(await stack.post("/v1/chat/completions", **body))
    assert (error["param"], error["message"]) == ("logit_bias", "no such token")


async def test_a_header_names_what_is_not_enforced(stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for stream in (False, True):
        schema = {"properties": {"t\u00e4gs": {"type": "array", "uniqueItems": True}}}
        reply = await stack.post("/v1/chat/completions", **body, response_format=named(schema), stream=stream)
        place = "response_format.json_schema.schema.properties.t%C3%A4gs.uniqueItems"
        assert (reply.status_code, reply.headers["x-schema-unenforced"]) == (200, place)
        reply = await stack.post("/v1/chat/completions", **body, response_format=named(POINT), stream=stream)
        assert "x-schema-unenforced" not in reply.headers


def test_objects_are_open_on_demand() -> None:
    switch = {"allow_additional_properties": True}
    for fields in (
        {"response_format": named(POINT), "structured_outputs": switch},
        {"structured_outputs": {"json": POINT, **switch}},
    ):
        found = wanted(**fields)
        assert found is not None
        assert json.loads(found.text)["x-guidance"] == {**SPACED, "closed": False}
    same = wanted(structured_outputs={"json": POINT, "disable_additional_properties": True})
    assert same == wanted(structured_outputs={"json": POINT, "disable_additional_properties": False})


def test_a_model_without_an_end_cannot_be_constrained() -> None:
    with pytest.raises(InvalidRequestError, match="ends an answer"):
        constraint_of(ConstraintFields(guided_regex="a"), frozenset())


async def test_workers_get_the_constraint_and_its_end_is_no_text(stack: Stack) -> None:
    for worker in stack.workers.values():
        worker.stop_at = 3
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "max_tokens": 9, "seed": 0}
    for stream in (False, True):
        response = await stack.post(
            "/v1/chat/completions", **body, structured_outputs={"regex": "The"}, stream=stream, temperature=0
        )
        assert response.status_code == 200, response.text
        if not stream:
            (choice,) = response.json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("The", "stop")
        else:
            assert '"finish_reason":"stop"' in response.text
            assert "<|end|>" not in response.text
    for worker in stack.workers.values():
        for call in worker.calls:
            assert call.work.sampling.constraint.text == "The"
            assert list(call.work.sampling.constraint.end_token_ids) == [END]
            assert not call.work.sampling.stop_token_ids
