"""The constraint of a whole answer: reasoning, content and tool calls. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import OPTIONS, check_grammar, check_options, expression_of
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.planning.answer_format import SPACED
from paceline.services.gateway.planning.answers.expressions import Spelling, ToolSpelling
from paceline.services.gateway.planning.answers.form import ChannelForm
from paceline.services.gateway.planning.answers.grammar import Choice, answer_grammar
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.constraints.content import constraint_of, what_is_left
from paceline.services.gateway.planning.constraints.fields import BUDGET, ConstraintFields
from paceline.services.gateway.planning.tool_schemas import Function, NamedTool

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerWriting:
    """How a model writes its answers: forms of reasoning and tool calls, and the spelling of texts in tokens."""

    forms: AnswerForms
    spelling: Spelling
    """How texts are written in the grammars of forms."""
    tag_spelling: Spelling
    """How texts are written in structural tags, in which every added token is written as its id."""
    end_token_ids: frozenset[int]


def make_constraint(fields: ConstraintFields, writing: AnswerWriting) -> Constraint | None:
    """Return the constraint of the answers to a request; None if they may have any form.

    Raises:
        InvalidRequestError: the constraint cannot be enforced. The error names the field.
    """
    content = constraint_of(fields, writing.end_token_ids, writing.tag_spelling)
    is_chat, thought = fields.is_chat, writing.forms.thought
    has_parts = fields.functions or (is_chat and content is not None and thought is not None)
    if not has_parts and fields.budget is None:
        return content
    choice, functions = _choice_of(fields)
    if fields.functions and not writing.end_token_ids:
        raise InvalidRequestError("tools: this model has no token that ends an answer", "tools")
    tools = writing.forms.tools if is_chat else None
    form = tools if fields.functions or isinstance(tools, ChannelForm) else None
    if isinstance(form, ChannelForm) and fields.has_header:
        thought = form = None  # the header of the message is in the prompt, so the rest of the answer is content
    wanted = fields.structured_outputs
    options = SPACED if wanted is None or not wanted.allow_additional_properties else {**SPACED, "closed": False}
    if form is not None:
        options = {**options, **form.notation(writing.spelling)}
    schemas = [_parameters(index, function, options) for index, function in functions]
    grammar = answer_grammar(
        writing.spelling,
        thought=thought,
        is_open=fields.is_open,
        budget=fields.budget,
        form=form,
        tools=[ToolSpelling(function.name, parameters) for (_, function), (parameters, _) in zip(functions, schemas)],
        choice=choice,
        parallel=fields.parallel_tool_calls,
        content=None if content is None else expression_of(content.kind, content.text),
    )
    place = content.place if content is not None else "tools" if fields.functions else BUDGET
    try:
        check_grammar(ConstraintKind.ANSWER, grammar)
    except ConstraintError as error:
        blamed = "tools" if fields.functions else place
        raise InvalidRequestError(f"{blamed}: {error}", blamed) from error
    left = tuple(name for _, names in schemas for name in names)
    left += () if content is None else content.unenforced
    return Constraint(ConstraintKind.ANSWER, grammar, writing.end_token_ids, place, left)


def _choice_of(fields: ConstraintFields) -> tuple[Choice, list[tuple[int, Function]]]:
    """Return the choice among tools, and each function that may be called with its index in the request's `tools`."""
    functions = [*enumerate(fields.functions)]
    choice = (fields.tool_choice or "auto") if fields.is_chat else "none"
    if isinstance(choice, NamedTool):
        return "required", [entry for entry in functions if entry[1].name == choice.function.name]
    return choice, functions


def _parameters(
    index: int, function: Function, options: Mapping[str, Any]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the schema to enforce for a function's arguments, and the places of its keywords that are not enforced.

    A function without parameters takes no arguments. A keyword that cannot be read is not enforced, unless the function
    is strict. If the schema as a whole is too large, any object is allowed instead.

    Raises:
        InvalidRequestError: the schema is not that of an object, or the function is strict and its schema cannot be
            enforced.
    """
    place = f"tools[{index}].function.parameters"
    given = {"properties": {}} if function.parameters is None else function.parameters
    schema = {"type": "object", **given}
    if schema["type"] not in ("object", ["object"]):
        raise InvalidRequestError(f"{place}: arguments are a JSON object, so type must be object", place)
    reason: Exception | None = None
    for own in (options, {**options, "tolerant": True}):
        enforced = {**schema, OPTIONS: own}
        try:
            check_options(schema)
            text = json.dumps(enforced, ensure_ascii=False)
            check_grammar(ConstraintKind.JSON_SCHEMA, text)
            return enforced, what_is_left(ConstraintKind.JSON_SCHEMA, text, place, function.strict)
        except (ConstraintError, RecursionError) as error:
            reason = error
            if function.strict:
                why = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise InvalidRequestError(f"{place}: {why}", place) from error
    return {**_ANY_ARGUMENTS, OPTIONS: options}, (f"{place}: {reason}",)
