"""The output format that a client asks for, and the constraint with which workers enforce it.

Clients use OpenAI's `response_format`, or vLLM's `structured_outputs` and older `guided_*` fields.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import ConfigDict, Field, ValidationError, model_validator

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import OPTIONS, check_grammar, check_options, unenforced
from paceline.core.grammar_errors import explain
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.answers.expressions import Spelling
from paceline.services.gateway.answers.structural_tag import Form, JsonSchema, Tag, TriggeredTags, grammar_of_tag
from paceline.services.gateway.errors import ApiError
from paceline.services.gateway.http.fail_fast import FailFast

if TYPE_CHECKING:
    from paceline.services.gateway.schemas import GenerationRequest


class Body(FailFast):
    """Base class of all parts of a request's body."""

    # Strict, so that "5" is not taken for a number, nor true for a token id.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


Choices = Annotated[list[str], Field(min_length=1)]


class JsonSchemaFormat(Body):
    """The field `json_schema` of OpenAI's `response_format`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    """Refuse a schema of which a part cannot be enforced. The other parts are always enforced."""


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
    """vLLM's `structured_outputs`. Exactly one of the first six fields must be set, or `response_format`."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    """The JSON text of a `response_format` of the type structural_tag."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    """As in vLLM. Objects are closed without it, too; see `allow_additional_properties`."""
    allow_additional_properties: bool = False
    """Paceline's own: read `additionalProperties` by the letter of JSON Schema. An object whose schema does not have it
    may then have properties that the schema does not name. Also applies to tools."""
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
        """How the grammar reads schemas; see `grammar.OPTIONS`."""
        spacing = COMPACT if self.disable_any_whitespace else _spacing(self.whitespace_pattern)
        return {**spacing, "closed": False} if self.allow_additional_properties else spacing


ANY_OBJECT = {"type": "object"}

COMPACT = {"whitespace_flexible": False}
SPACED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""Allows white space between all JSON tokens, as models have learned to write it. The limit of 32 characters is there
because small models may otherwise write white space for ever."""

UNENFORCED_HEADER = "x-schema-unenforced"
_HEADER_CHARACTERS = 2000

_NO_TOKENS: Mapping[str, int] = {}


class Wish(NamedTuple):
    """A constraint that a field of a request asks for."""

    place: str
    """The field."""
    kind: ConstraintKind
    text: str
    is_strict: bool = False
    """Whether all of a schema must be enforced."""


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
    place, kind, text, is_strict = wishes[0]
    if len(wishes) > 1:
        places = " and ".join(wish.place for wish in wishes)
        raise InvalidRequestError(f"{places}: set only one of them", place)
    if request.allowed_token_ids is not None:
        raise InvalidRequestError(f"allowed_token_ids and {place}: set only one of them", "allowed_token_ids")
    if not end_token_ids:
        raise InvalidRequestError(f"{place}: this model has no token that ends an answer", place)
    try:
        check_constraint(kind, text)
    except ConstraintError as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error
    return Constraint(kind, text, end_token_ids, place, what_is_left(kind, text, place, is_strict))


def what_is_left(kind: ConstraintKind, text: str, place: str, is_strict: bool | None) -> tuple[str, ...]:
    """Return the fields of the API with keywords of JSON schemas that a constraint does not enforce.

    Raises InvalidRequestError if everything must be enforced. Formats are annotations, as the specification has it.
    """
    left = unenforced(kind, text)
    if is_strict and (broken := [each.path for each in left if each.keyword != "format"]):
        message = f"{place}: {', '.join(broken)} cannot be enforced in full; leave it out, or set strict to false"
        raise InvalidRequestError(message, place)
    return tuple(f"{place}.{each.path}" for each in left)


def unenforced_header(constraint: Constraint | None) -> dict[str, str]:
    """Return the header that tells a client which keywords of its schemas are not enforced; none if all are."""
    if constraint is None or not constraint.unenforced:
        return {}
    return {UNENFORCED_HEADER: quote(", ".join(constraint.unenforced), safe=" ,:.[]()$")[:_HEADER_CHARACTERS]}


def name_client_field(error: Exception, constraint: Constraint | None) -> Exception:
    """Return a worker's error about a constraint as an error about the client's field, and other errors unchanged."""
    if constraint is None or not isinstance(error, InvalidRequestError) or error.param != ConstraintError.PARAM:
        return error
    return InvalidRequestError(f"{constraint.place}: {error}", constraint.place)


# Cached, because clients send the same schema again and again.
check_constraint = functools.lru_cache(maxsize=64)(check_grammar)


def _wishes(request: GenerationRequest, spelling: Spelling) -> Iterator[Wish]:
    wanted = request.structured_outputs
    options = SPACED if wanted is None else wanted.options
    if (form := request.response_format) is not None:
        if form.type == "json_object":
            text = _schema_text(ANY_OBJECT, "response_format", options)
            yield Wish("response_format", ConstraintKind.JSON_SCHEMA, text)
        elif form.type == "json_schema":
            place = "response_format.json_schema"
            if form.json_schema is None:
                raise InvalidRequestError(f"{place} is missing: it holds a name and a schema", place)
            place += ".schema"
            if form.json_schema.schema_ is None:
                raise InvalidRequestError(f"{place} is missing: it describes the answer", place)
            text = _schema_text(form.json_schema.schema_, place, options)
            yield Wish(place, ConstraintKind.JSON_SCHEMA, text, bool(form.json_schema.strict))
        elif form.type == "structural_tag":
            yield Wish("response_format", ConstraintKind.ANSWER, _tag_text(form, "response_format", spelling, options))
    if wanted is not None:
        given = (wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
        if form is None and all(each is None for each in (*given, wanted.json_object or None, wanted.structural_tag)):
            place = "structured_outputs"
            names = "json, regex, choice, grammar, json_object, structural_tag"
            raise InvalidRequestError(f"{place} needs one of {names}, or a response_format", place)
        yield from _said("structured_outputs.", *given, options)
        if wanted.json_object:
            place = "structured_outputs.json_object"
            yield Wish(place, ConstraintKind.JSON_SCHEMA, _schema_text(ANY_OBJECT, place, options))
        if wanted.structural_tag is not None:
            place = "structured_outputs.structural_tag"
            tag = _read_tag(wanted.structural_tag, place)
            yield Wish(place, ConstraintKind.ANSWER, _tag_text(tag, place, spelling, options))
    older = (request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    yield from _said("guided_", *older, _spacing(request.guided_whitespace_pattern))


def _said(
    prefix: str,
    schema: object,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    options: dict[str, Any],
) -> Iterator[Wish]:
    if schema is not None:
        yield Wish(f"{prefix}json", ConstraintKind.JSON_SCHEMA, _schema_text(schema, f"{prefix}json", options))
    if regex is not None:
        yield Wish(f"{prefix}regex", ConstraintKind.REGEX, regex)
    if choice is not None:
        yield Wish(f"{prefix}choice", ConstraintKind.CHOICE, json.dumps(choice, ensure_ascii=False))
    if grammar is not None:
        yield Wish(f"{prefix}grammar", ConstraintKind.GRAMMAR, grammar)


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


def _tag_text(tag: AnswerFormat, place: str, spelling: Spelling, options: dict[str, Any]) -> str:
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
        return grammar_of_tag(form, spelling, options)
    except (ConstraintError, RecursionError) as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error


def _schema_text(schema: object, place: str, options: dict[str, Any]) -> str:
    """Return a schema as JSON text that also has options for its grammar.

    Raises InvalidRequestError if it is not a JSON object, or has such options itself.
    """
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{place}: a schema must be a JSON object, or true to allow any value", place)
        check_options(schema)
        return json.dumps({**schema, OPTIONS: options}, ensure_ascii=False)
    except ConstraintError as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error
    except (ValueError, RecursionError) as error:
        why = explain(str(error)) if isinstance(error, RecursionError) else f"not a JSON schema: {error}"
        raise InvalidRequestError(f"{place}: {why}", place) from error
