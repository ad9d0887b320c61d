from __future__ import annotations

import json
import random

from bench.serving.structured import Answer, complaint, random_schema
from paceline.core.grammar import check_grammar
from paceline.core.types import ConstraintKind


def test_random_schemas_can_be_enforced_and_come_from_the_seed() -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(100)]
    for schema in schemas:
        check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    assert schemas == [random_schema(random.Random(seed)) for seed in range(100)]
    assert len({json.dumps(schema) for schema in schemas}) > 90


def test_every_way_to_be_wrong_is_a_complaint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert complaint(schema, Answer('{"a": 1}', 5, "stop")) == ""
    for answer in (
        Answer('{"a": "1"}', 5, "stop"),
        Answer('{"a": 1', 5, "stop"),
        Answer('{"a": 1}', 5, "length"),
        Answer('{"a": 1}', 5, "stop", error="status 500"),
    ):
        assert complaint(schema, answer)
