"""Lists and objects in bodies end at their first error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.core.config import GatewayConfig
from paceline.services.gateway.api.messages.schemas import MessagesRequest
from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.app import create_app
from paceline.services.gateway.gateway import Gateway, load_models
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.planning.token_schemas import TokenSampling

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1.5] * 1000},
        {"prompt": "a", "logit_bias": {str(number): "x" for number in range(1000)}},
    ],
)
def test_a_list_ends_at_its_first_error(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    assert caught.value.error_count() <= 4  # one for each type that the field may have


def test_a_list_of_a_structural_tag_ends_at_its_first_error() -> None:
    triggers = {"type": "triggered_tags", "triggers": [0] * 1000, "tags": [0] * 1000}
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [triggers] * 1000}}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": MESSAGES, "response_format": tag})
    assert caught.value.error_count() == 2  # one for each field of the first element


BODIES: list[tuple[type[BaseModel], dict[str, object], str]] = [
    (ChatRequest, {"messages": MESSAGES}, "max_completion_tokens"),
    (ChatRequest, {"messages": MESSAGES}, "min_tokens"),
    (CompletionRequest, {"prompt": "a"}, "n"),
    (CompletionRequest, {"prompt": "a"}, "seed"),
    (MessagesRequest, {"messages": MESSAGES, "max_tokens": 1}, "max_tokens"),
    (ResponsesRequest, {"input": "a"}, "max_output_tokens"),
    (TokenSampling, {}, "top_k"),
]


@pytest.mark.parametrize(("model", "body", "field"), BODIES)
def test_a_whole_number_may_have_a_point(model: type[BaseModel], body: dict[str, object], field: str) -> None:
    """JSON has one kind of numbers, and some clients write all of them with a point."""
    read = getattr(model.model_validate({**body, field: 5.0}), field)
    assert (read, type(read)) == (5, int)
    for wrong in (5.5, "5", True):
        with pytest.raises(ValidationError):
            model.model_validate({**body, field: wrong})
    assert "integer" in json.dumps(model.model_json_schema()["properties"][field])


def test_all_lists_and_objects_of_all_bodies_end_at_their_first_error(toy_model: Path) -> None:
    config = GatewayConfig(model=str(toy_model))
    routes = [route for route in create_app(Gateway(config, load_models(config))).routes if isinstance(route, APIRoute)]
    bodies = {route.path: route.body_field for route in routes if route.body_field is not None}
    assert len(bodies) > 20
    for path, body in bodies.items():
        schema = TypeAdapter(body.field_info.annotation).core_schema
        unmarked = [part for part in _parts_of(schema) if not part.get("fail_fast")]
        assert not unmarked, path


def _parts_of(schema: object) -> Iterator[dict[str, object]]:
    """Yield the schemas of lists and objects within a schema."""
    left, seen = [schema], set[int]()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            if part.get("type") in ("list", "dict"):
                yield part
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
