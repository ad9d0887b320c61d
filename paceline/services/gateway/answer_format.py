"""How clients say what form an answer has: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.services.gateway.body import Body
from paceline.services.gateway.errors import ApiError

Choices = Annotated[list[str], Field(min_length=1)]


class JsonSchemaFormat(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    """A schema is always enforced."""


class AnswerFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of the first five."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        said = {name: value for name, value in data.items() if value is not None}
        if said.get("json_object") is False:
            del said["json_object"]
        known = {field.alias or name for name, field in cls.model_fields.items()}
        # What could change the answer must not be dropped in silence.
        if unknown := [name for name, value in said.items() if name not in known and value is not False]:
            place = f"structured_outputs.{unknown[0][:80]}"
            raise ApiError(400, f"{place} is not supported by this server; leave it out", param=place)
        if not said.keys() & (known - {"disable_any_whitespace"}):
            message = "structured_outputs needs one of json, regex, choice, grammar, json_object"
            raise ApiError(400, message, param="structured_outputs")
        return said
