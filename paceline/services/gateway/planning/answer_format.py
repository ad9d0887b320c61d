"""The output format that a client asks for; `planning/constraints/content.py` makes a constraint of the format.

Clients use OpenAI's `response_format`, or vLLM's `structured_outputs` and older `guided_*` fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import Field, model_validator

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.types import Constraint
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.answers.structural_tag import Form
from paceline.services.gateway.planning.request_body import Body

Choices = Annotated[list[str], Field(min_length=1)]


class JsonSchemaFormat(Body):
    """The field `json_schema` of OpenAI's `response_format`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    """Whether to refuse the request if a part of the schema cannot be enforced. Otherwise only this part is ignored."""


class Structure(Body):
    """A tag of vLLM's older structural tags: JSON between two texts."""

    begin: str
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    end: str


class AnswerFormat(Body):
    """OpenAI's `response_format`, and vLLM's structural tags: either `format`, or `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Form | None = None
    structures: Annotated[list[Structure], Field(min_length=1)] | None = None
    triggers: Annotated[list[str], Field(min_length=1)] | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`. Without a `response_format`, exactly one of its first six fields must be set."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    """The JSON text of a `response_format` of the type structural_tag."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    """vLLM's field, without effect: objects are always closed unless `allow_additional_properties` is set."""
    allow_additional_properties: bool = False
    """Paceline's own field: whether objects may have properties that their schemas do not name, as in JSON Schema, if a
    schema has no `additionalProperties`. Also applies to tools."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between two JSON tokens."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        said = {name: value for name, value in data.items() if value is not None}
        if said.get("json_object") is False:
            del said["json_object"]
        known = {field.alias or name for name, field in cls.model_fields.items()}
        # An unknown field could change the answer, so it must not be ignored silently.
        if unknown := [name for name, value in said.items() if name not in known and value is not False]:
            place = f"structured_outputs.{unknown[0][:80]}"
            raise ApiError(400, f"{place} is not supported by this server; leave it out", param=place)
        for name, other in (
            ("whitespace_pattern", "disable_any_whitespace"),
            ("allow_additional_properties", "disable_additional_properties"),
        ):
            if said.get(name) and said.get(other):
                place = f"structured_outputs.{name}"
                raise ApiError(400, f"{place} and {other}: set only one of them", param=place)
        return said

    @property
    def options(self) -> dict[str, Any]:
        """The options for reading JSON schemas as a grammar; see `grammar.OPTIONS`."""
        spacing = COMPACT if self.disable_any_whitespace else spacing_of(self.whitespace_pattern)
        return {**spacing, "closed": False} if self.allow_additional_properties else spacing


class ContentFields(Body):
    """The fields of a request that say which form the answer's content must have."""

    response_format: AnswerFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names for structured_outputs.
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


ANY_OBJECT = {"type": "object"}

COMPACT = {"whitespace_flexible": False}
SPACED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""Options that allow white space between all JSON tokens, as models have learned to write. The limit of 32 characters
stops small models that would write white space for ever."""

UNENFORCED_HEADER = "x-schema-unenforced"
_HEADER_CHARACTERS = 2000


def unenforced_header(constraint: Constraint | None) -> dict[str, str]:
    """Return the header that tells a client which keywords of its schemas are not enforced; {} if all are enforced."""
    if constraint is None or not constraint.unenforced:
        return {}
    return {UNENFORCED_HEADER: quote(", ".join(constraint.unenforced), safe=" ,:.[]()$")[:_HEADER_CHARACTERS]}


def name_client_field(error: Exception, constraint: Constraint | None) -> Exception:
    """Return the error about a client's field for a worker's error about its constraint; other errors unchanged."""
    if constraint is None or not isinstance(error, InvalidRequestError) or error.param != ConstraintError.PARAM:
        return error
    return InvalidRequestError(f"{constraint.place}: {error}", constraint.place)


def spacing_of(pattern: str | None) -> dict[str, Any]:
    """Return the schema options for white space between JSON tokens.

    Args:
        pattern: a regular expression for the white space; None for up to 32 characters of any white space.
    """
    return SPACED if pattern is None else {"whitespace_pattern": pattern}
