"""The constraint of an answer's content, from `response_format`, `structured_outputs` or the older `guided_*`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import OPTIONS, check_grammar, check_options, unenforced
from paceline.core.grammar_errors import explain
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.planning.answer_format import ANY_OBJECT, SPACED, AnswerFormat, spacing_of
from paceline.services.gateway.planning.answers.expressions import Spelling
from paceline.services.gateway.planning.answers.structural_tag import JsonSchema, Tag, TriggeredTags, grammar_of_tag

if TYPE_CHECKING:
    from paceline.services.gateway.planning.constraints.fields import ConstraintFields

_PLAIN = Spelling({})


class WantedContent(NamedTuple):
    """A constraint of the content that one field of a request asks for."""

    place: str
    """Path of the field in the request."""
    kind: ConstraintKind
    text: str
    is_strict: bool = False
    """Whether every keyword of the schema must be enforced; otherwise the request is refused."""


def constraint_of(
    fields: ConstraintFields,
    end_token_ids: frozenset[int],
    spelling: Spelling = _PLAIN,
) -> Constraint | None:
    """Return the constraint of the content that a request asks for, after checking it; None if it asks for none.

    Args:
        end_token_ids: ids of the tokens with which the model ends an answer.
        spelling: how texts are written in structural tags, in which added tokens are ids.

    Raises:
        InvalidRequestError: there are several constraints, or one that cannot be enforced. The error names the field.
    """
    wishes = list(_wishes(fields, spelling))
    if not wishes:
        return None
    place, kind, text, is_strict = wishes[0]
    if len(wishes) > 1:
        places = " and ".join(wish.place for wish in wishes)
        raise InvalidRequestError(f"{places}: set only one of them", place)
    if fields.allowed_token_ids is not None:
        raise InvalidRequestError(f"allowed_token_ids and {place}: set only one of them", "allowed_token_ids")
    if not end_token_ids:
        raise InvalidRequestError(f"{place}: this model has no token that ends an answer", place)
    try:
        check_grammar(kind, text)
    except ConstraintError as error:
        raise InvalidRequestError(f"{place}: {error}", place) from error
    return Constraint(kind, text, end_token_ids, place, what_is_left(kind, text, place, is_strict))


def what_is_left(kind: ConstraintKind, text: str, place: str, is_strict: bool | None) -> tuple[str, ...]:
    """Return the places of the keywords of a JSON schema that its constraint does not enforce, as paths in the request.

    Raises InvalidRequestError if there are any and `is_strict` is set. The keyword `format` may always be left out,
    because it is an annotation in JSON Schema.
    """
    left = unenforced(kind, text)
    if is_strict and (broken := [each.path for each in left if each.keyword != "format"]):
        message = f"{place}: {', '.join(broken)} cannot be enforced in full; leave it out, or set strict to false"
        raise InvalidRequestError(message, place)
    return tuple(f"{place}.{each.path}" for each in left)


def _wishes(fields: ConstraintFields, spelling: Spelling) -> Iterator[WantedContent]:
    wanted = fields.structured_outputs
    options = SPACED if wanted is None else wanted.options
    if (form := fields.response_format) is not None:
        if form.type == "json_object":
            text = _schema_text(ANY_OBJECT, "response_format", options)
            yield WantedContent("response_format", ConstraintKind.JSON_SCHEMA, text)
        elif form.type == "json_schema":
            place = "response_format.json_schema"
            if form.json_schema is None:
                raise InvalidRequestError(f"{place} is missing: it holds a name and a schema", place)
            place += ".schema"
            if form.json_schema.schema_ is None:
                raise InvalidRequestError(f"{place} is missing: it describes the answer", place)
            text = _schema_text(form.json_schema.schema_, place, options)
            yield WantedContent(place, ConstraintKind.JSON_SCHEMA, text, bool(form.json_schema.strict))
        elif form.type == "structural_tag":
            yield WantedContent(
                "response_format", ConstraintKind.ANSWER, _tag_text(form, "response_format", spelling, options)
            )
    if wanted is not None:
        given = (wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
        if form is None and all(each is None for each in (*given, wanted.json_object or None, wanted.structural_tag)):
            place = "structured_outputs"
            names = "json, regex, choice, grammar, json_object, structural_tag"
            raise InvalidRequestError(f"{place} needs one of {names}, or a response_format", place)
        yield from _said("structured_outputs.", *given, options)
        if wanted.json_object:
            place = "structured_outputs.json_object"
            yield WantedContent(place, ConstraintKind.JSON_SCHEMA, _schema_text(ANY_OBJECT, place, options))
        if wanted.structural_tag is not None:
            place = "structured_outputs.structural_tag"
            tag = _read_tag(wanted.structural_tag, place)
            yield WantedContent(place, ConstraintKind.ANSWER, _tag_text(tag, place, spelling, options))
    older = (fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    yield from _said("guided_", *older, spacing_of(fields.guided_whitespace_pattern))


def _said(
    prefix: str,
    schema: object,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    options: dict[str, Any],
) -> Iterator[WantedContent]:
    if schema is not None:
        yield WantedContent(f"{prefix}json", ConstraintKind.JSON_SCHEMA, _schema_text(schema, f"{prefix}json", options))
    if regex is not None:
        yield WantedContent(f"{prefix}regex", ConstraintKind.REGEX, regex)
    if choice is not None:
        yield WantedContent(f"{prefix}choice", ConstraintKind.CHOICE, json.dumps(choice, ensure_ascii=False))
    if grammar is not None:
        yield WantedContent(f"{prefix}grammar", ConstraintKind.GRAMMAR, grammar)


def _read_tag(text: str, place: str) -> AnswerFormat:
    """Return a structural tag from its JSON text. Raises InvalidRequestError if the text is not a valid tag."""
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
