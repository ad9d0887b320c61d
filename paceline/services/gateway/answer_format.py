"""The form that a client asks an answer to have, and the constraint that workers enforce for it.

Clients use OpenAI's `response_format`, or vLLM's `structured_outputs` and older `guided_*` fields.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import check_grammar, check_options
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.errors import ApiError

if TYPE_CHECKING:
    from paceline.services.gateway.schemas import GenerationRequest


class Body(BaseModel):
    # Strict: "5" is no number and true is no token.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


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


ANY_OBJECT = {"type": "object"}

COMPACT = {"whitespace_flexible": False}
SPACED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""White space anywhere, as models have learned to write it; without a bound small ones write nothing else for ever."""

Wish = tuple[str, ConstraintKind, str]
"""Where a constraint is said, and what it is."""


def constraint_of(request: GenerationRequest, end_token_ids: frozenset[int]) -> Constraint | None:
    """The constraint that a request asks for, checked.

    Args:
        end_token_ids: tokens with which the model ends an answer.

    Raises:
        InvalidRequestError: there are several, or it cannot be enforced; names the field.
    """
    wishes = list(_wishes(request))
    if not wishes:
        return None
    place, kind, text = wishes[0]
    if len(wishes) > 1:
        places = " and ".join(place for place, *_ in wishes)
        raise InvalidRequestError(f"{places}: say only one of them", place)
    if request.allowed_token_ids is not None:
        raise InvalidRequestError(f"allowed_token_ids and {place}: say only one of them", "allowed_token_ids")
    if not end_token_ids:
        raise InvalidRequestError(f"{place}: this model has no token that ends an answer", place)
    try:
        _check(kind, text)
    except ConstraintError as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error
    return Constraint(kind, text, end_token_ids, place)


def name_client_field(error: Exception, constraint: Constraint | None) -> Exception:
    """What a worker says of a constraint, said of the client's field; any other error as it is."""
    if constraint is None or not isinstance(error, InvalidRequestError) or error.param != ConstraintError.PARAM:
        return error
    return InvalidRequestError(f"{constraint.place}: {error}", constraint.place)


# Clients send one schema again and again.
_check = functools.lru_cache(maxsize=64)(check_grammar)


def _wishes(request: GenerationRequest) -> Iterator[Wish]:
    if (form := request.response_format) is not None:
        if form.type == "json_object":
            yield "response_format", ConstraintKind.JSON_SCHEMA, _schema_text(ANY_OBJECT, "response_format", SPACED)
        elif form.type == "json_schema":
            place = "response_format.json_schema"
            if form.json_schema is None:
                raise InvalidRequestError(f"{place} is missing: it holds a name and a schema", place)
            place += ".schema"
            if form.json_schema.schema_ is None:
                raise InvalidRequestError(f"{place} is missing: say what the answer has to look like", place)
            yield place, ConstraintKind.JSON_SCHEMA, _schema_text(form.json_schema.schema_, place, SPACED)
    if (wanted := request.structured_outputs) is not None:
        spacing = COMPACT if wanted.disable_any_whitespace else SPACED
        given = (wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
        yield from _said("structured_outputs.", *given, spacing)
        if wanted.json_object:
            place = "structured_outputs.json_object"
            yield place, ConstraintKind.JSON_SCHEMA, _schema_text(ANY_OBJECT, place, spacing)
    older = (request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    yield from _said("guided_", *older, SPACED)


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


def _schema_text(schema: object, place: str, spacing: dict[str, Any]) -> str:
    """A schema as text, with how the library is to space what it describes."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{place}: a schema is a JSON object, in which something is possible", place)
        check_options(schema)
        return json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
    except ConstraintError as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{place}: not a JSON schema: {error}", place) from error
