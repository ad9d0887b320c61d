"""The output format that a client asks for, and the constraint with which workers enforce it.

Clients use OpenAI's `response_format`, or vLLM's `structured_outputs` and older `guided_*` fields.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import check_grammar, check_options
from paceline.core.grammar_errors import explain
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.answers.expressions import Spelling
from paceline.services.gateway.answers.structural_tag import Form, JsonSchema, Tag, TriggeredTags, grammar_of_tag
from paceline.services.gateway.errors import ApiError

if TYPE_CHECKING:
    from paceline.services.gateway.schemas import GenerationRequest


class Body(BaseModel):
    """Base class of all parts of a request's body."""

    # Strict, so that "5" is not taken for a number, nor true for a token id.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let lists and objects end at their first error, because a million errors would fill the memory."""
        schema = handler(source)
        left: list[object] = [schema]
        while left:
            part = left.pop()
            if isinstance(part, dict):
                if part.get("type") in ("list", "dict"):
                    part["fail_fast"] = True
                left += part.values()
            elif isinstance(part, list | tuple):
                left += part
        return schema


Choices = Annotated[list[str], Field(min_length=1)]


class JsonSchemaFormat(Body):
    """The field `json_schema` of OpenAI's `response_format`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    """Ignored: a schema is always enforced."""


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
    """vLLM's `structured_outputs`. Exactly one of the first six fields must be set."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    """The JSON text of a `response_format` of the type structural_tag."""
    disable_any_whitespace: bool = False
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
        if not said.keys() & (known - {"disable_any_whitespace", "whitespace_pattern"}):
            message = "structured_outputs needs one of json, regex, choice, grammar, json_object, structural_tag"
            raise ApiError(400, message, param="structured_outputs")
        if said.get("disable_any_whitespace") and "whitespace_pattern" in said:
            place = "structured_outputs.whitespace_pattern"
            raise ApiError(400, f"{place} and disable_any_whitespace: set only one of them", param=place)
        return said


ANY_OBJECT = {"type": "object"}

COMPACT = {"whitespace_flexible": False}
SPACED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""Allows white space between all JSON tokens, as models have learned to write it. The limit of 32 characters is there
because small models may otherwise write white space for ever."""

_NO_TOKENS: Mapping[str, int] = {}

Wish = tuple[str, ConstraintKind, str]
"""The field that asks for a constraint, the constraint's kind, and its text."""


def constraint_of(
    request: GenerationRequest, end_token_ids: frozenset[int], own_tokens: Mapping[str, int] = _NO_TOKENS
) -> Constraint | None:
    """Return the constraint that a request asks for, after checking it; None if it asks for none.

    Args:
        end_token_ids: ids of the tokens with which the model ends an answer.
        own_tokens: ids of the tokens that were added to the vocabulary, by text.

    Raises:
        InvalidRequestError: there are several constraints, or it cannot be enforced. The error names the field.
    """
    wishes = list(_wishes(request, Spelling(own_tokens)))
    if not wishes:
        return None
    place, kind, text = wishes[0]
    if len(wishes) > 1:
        places = " and ".join(place for place, *_ in wishes)
        raise InvalidRequestError(f"{places}: set only one of them", place)
    if request.allowed_token_ids is not None:
        raise InvalidRequestError(f"allowed_token_ids and {place}: set only one of them", "allowed_token_ids")
    if not end_token_ids:
        raise InvalidRequestError(f"{place}: this model has no token that ends an answer", place)
    try:
        check_constraint(kind, text)
    except ConstraintError as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error
    return Constraint(kind, text, end_token_ids, place)


def name_client_field(error: Exception, constraint: Constraint | None) -> Exception:
    """Return a worker's error about a constraint as an error about the client's field, and other errors unchanged."""
    if constraint is None or not isinstance(error, InvalidRequestError) or error.param != ConstraintError.PARAM:
        return error
    return InvalidRequestError(f"{constraint.place}: {error}", constraint.place)


# Cached, because clients send the same schema again and again.
check_constraint = functools.lru_cache(maxsize=64)(check_grammar)


def _wishes(request: GenerationRequest, spelling: Spelling) -> Iterator[Wish]:
    if (form := request.response_format) is not None:
        if form.type == "json_object":
            yield "response_format", ConstraintKind.JSON_SCHEMA, _schema_text(ANY_OBJECT, "response_format", SPACED)
        elif form.type == "json_schema":
            place = "response_format.json_schema"
            if form.json_schema is None:
                raise InvalidRequestError(f"{place} is missing: it holds a name and a schema", place)
            place += ".schema"
            if form.json_schema.schema_ is None:
                raise InvalidRequestError(f"{place} is missing: it describes the answer", place)
            yield place, ConstraintKind.JSON_SCHEMA, _schema_text(form.json_schema.schema_, place, SPACED)
        elif form.type == "structural_tag":
            yield "response_format", ConstraintKind.ANSWER, _tag_text(form, "response_format", spelling)
    if (wanted := request.structured_outputs) is not None:
        spacing = COMPACT if wanted.disable_any_whitespace else _spacing(wanted.whitespace_pattern)
        given = (wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
        yield from _said("structured_outputs.", *given, spacing)
        if wanted.json_object:
            place = "structured_outputs.json_object"
            yield place, ConstraintKind.JSON_SCHEMA, _schema_text(ANY_OBJECT, place, spacing)
        if wanted.structural_tag is not None:
            place = "structured_outputs.structural_tag"
            yield place, ConstraintKind.ANSWER, _tag_text(_read_tag(wanted.structural_tag, place), place, spelling)
    older = (request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    yield from _said("guided_", *older, _spacing(request.guided_whitespace_pattern))


def _said(
    prefix: str,
    schema: object,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    spacing: dict[str, Any],
) -> Iterator[Wish]:
    if schema is not None:
        yield f"{prefix}json", ConstraintKind.JSON_SCHEMA, _schema_text(schema, f"{prefix}json", spacing)
    if regex is not None:
        yield f"{prefix}regex", ConstraintKind.REGEX, regex
    if choice is not None:
        yield f"{prefix}choice", ConstraintKind.CHOICE, json.dumps(choice, ensure_ascii=False)
    if grammar is not None:
        yield f"{prefix}grammar", ConstraintKind.GRAMMAR, grammar


def _spacing(pattern: str | None) -> dict[str, Any]:
    return SPACED if pattern is None else {"whitespace_pattern": pattern}


def _read_tag(text: str, place: str) -> AnswerFormat:
    """Return a structural tag from its JSON text. Raises InvalidRequestError if it is none."""
    try:
        return AnswerFormat.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise InvalidRequestError(f"{place}: {where[:200]}: {first['msg']}", place) from error


def _tag_text(tag: AnswerFormat, place: str, spelling: Spelling) -> str:
    """Return the grammar of a structural tag. Raises InvalidRequestError if it cannot be enforced."""
    form = tag.format
    if (form is None) == (tag.structures is None or tag.triggers is None):
        raise InvalidRequestError(f"{place}: a structural tag has either format, or structures and triggers", place)
    if form is None:
        assert tag.structures is not None
        assert tag.triggers is not None
        tags = [
            Tag(begin=each.begin, content=JsonSchema(type="json_schema", json_schema=each.schema_), end=each.end)
            for each in tag.structures
        ]
        form = TriggeredTags(type="triggered_tags", triggers=tag.triggers, tags=tags)
    try:
        return grammar_of_tag(form, spelling, SPACED)
    except (ConstraintError, RecursionError) as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error


def _schema_text(schema: object, place: str, spacing: dict[str, Any]) -> str:
    """Return a schema as JSON text that also tells the grammar library which white space to allow.

    Raises InvalidRequestError if it is not a JSON object, or sets options of the grammar library itself.
    """
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{place}: a schema must be a JSON object, or true to allow any value", place)
        check_options(schema)
        return json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
    except ConstraintError as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error
    except (ValueError, RecursionError) as error:
        why = explain(str(error)) if isinstance(error, RecursionError) else f"not a JSON schema: {error}"
        raise InvalidRequestError(f"{place}: {why}", place) from error
