"""How one request's answers are read, and the constraint that keeps them in form. Pure functions."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import OPTIONS, check_options, expression_of
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.answer_format import SPACED, check_constraint, what_is_left
from paceline.services.gateway.answers.answer import Answer, new_call_id
from paceline.services.gateway.answers.expressions import Tool
from paceline.services.gateway.answers.form import ChannelForm, Thought, ToolForm
from paceline.services.gateway.answers.grammar import Choice, answer_grammar
from paceline.services.gateway.answers.parser import read_answer
from paceline.services.gateway.answers.reader import Steps
from paceline.services.gateway.answers.registry import AnswerForms
from paceline.services.gateway.chat_schemas import Function, NamedTool
from paceline.services.gateway.schemas import ChatRequest, GenerationRequest
from paceline.services.gateway.tokenizer import Tokenizer

_BUDGET = "thinking_token_budget"
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers of a request are read."""

    read: Callable[[Answer], Steps[None]]
    """The computation that reads one answer."""
    kept_token_ids: frozenset[int]
    """Special tokens whose text the parser needs."""
    new_call_id: Callable[[], str] = new_call_id
    """Returns an id for a tool call."""


def plan_answer(request: ChatRequest, forms: AnswerForms, tokenizer: Tokenizer, prompt: str) -> AnswerPlan | None:
    """Return how the answers of a request are read; None if they are nothing but content.

    Args:
        prompt: the rendered conversation.
    """
    thought, form = forms.thought, _form_of(request, forms)
    if form is None and thought is None:
        return None
    functions = [tool.function for tool in request.tools or ()]
    given = [Tool(function.name, function.parameters or {}) for function in functions]
    tools = form.argument_types(given) if form is not None else {}
    markers = [*(form.markers if form is not None else ()), *((thought.start, thought.end) if thought else ())]
    is_open = _is_open(request, thought, prompt)
    read = functools.partial(read_answer, thought=thought, form=form, is_open=is_open, tools=tools)
    kept = tokenizer.vocabulary.spelling.tokens("".join(markers))
    return AnswerPlan(read, kept, form.new_call_id if form is not None else new_call_id)


def answer_constraint(
    request: ChatRequest,
    forms: AnswerForms,
    tokenizer: Tokenizer,
    prompt: str,
    content: Constraint | None,
) -> Constraint | None:
    """Return the constraint of an answer with its tool calls and its reasoning.

    Args:
        prompt: the rendered conversation.
        content: the constraint of the content alone.

    Raises:
        InvalidRequestError: the tools cannot be enforced. The error names the field.
    """
    thought, budget = forms.thought, _budget_of(request, forms)
    if not request.tools and budget is None and (content is None or thought is None):
        return content
    choice, functions = _choice_of(request)
    if request.tools and not tokenizer.eos_token_ids:
        raise InvalidRequestError("tools: this model has no token that ends an answer", "tools")
    is_open, form = _is_open(request, thought, prompt), _form_of(request, forms)
    if isinstance(form, ChannelForm) and request.continue_final_message and not is_open:
        thought = form = None  # the header of the message is in the prompt, so the rest of the answer is content
    wanted = request.structured_outputs
    options = SPACED if wanted is None or not wanted.allow_additional_properties else {**SPACED, "closed": False}
    if form is not None:
        options = {**options, **form.notation(tokenizer.vocabulary.spelling)}
    schemas = [_parameters(index, function, options) for index, function in functions]
    grammar = answer_grammar(
        tokenizer.vocabulary.spelling,
        thought=thought,
        is_open=is_open,
        budget=None if budget is None else max(0, budget - _spent(request, tokenizer, thought)),
        form=form,
        tools=[Tool(function.name, parameters) for (_, function), (parameters, _) in zip(functions, schemas)],
        choice=choice,
        parallel=request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool),
        content=None if content is None else expression_of(content.kind, content.text),
    )
    try:
        check_constraint(ConstraintKind.ANSWER, grammar)
    except ConstraintError as error:
        raise InvalidRequestError(f"tools: {error}", "tools") from error
    place = content.place if content is not None else "tools" if request.tools else _BUDGET
    left = tuple(name for _, names in schemas for name in names)
    left += () if content is None else content.unenforced
    return Constraint(ConstraintKind.ANSWER, grammar, tokenizer.eos_token_ids, place, left)


def completion_constraint(
    request: GenerationRequest,
    forms: AnswerForms,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    content: Constraint | None,
) -> Constraint | None:
    """Return the constraint of an answer to a prompt that is no conversation, with its budget of reasoning.

    Args:
        token_ids: the prompt. The answer begins within reasoning that the prompt begins and does not end.
        content: the constraint of the answer after its reasoning.

    Raises:
        InvalidRequestError: there is a budget, and the model has no reasoning.
    """
    thought, budget = forms.thought, _budget_of(request, forms)
    if thought is None or budget is None:
        return content
    begun = _begun(tokenizer.decode(token_ids), thought)
    grammar = answer_grammar(
        tokenizer.vocabulary.spelling,
        thought=thought,
        is_open=begun is not None,
        budget=max(0, budget - len(tokenizer.encode(begun or "", False))),
        form=None,
        tools=(),
        choice="none",
        parallel=False,
        content=None if content is None else expression_of(content.kind, content.text),
    )
    place, left = (_BUDGET, ()) if content is None else (content.place, content.unenforced)
    return Constraint(ConstraintKind.ANSWER, grammar, tokenizer.eos_token_ids, place, left)


def _budget_of(request: GenerationRequest, forms: AnswerForms) -> int | None:
    """Return the largest number of tokens of reasoning; None if there is no limit."""
    budget = request.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if forms.thought is None:
        raise InvalidRequestError(
            f"{_BUDGET}: this server knows no markers of reasoning for this model; start it with "
            "--reasoning-parser NAME, or leave the budget out",
            _BUDGET,
        )
    return budget


def _begun(text: str, thought: Thought) -> str | None:
    """Return the reasoning that a text ends with; None if there is none, or if it has ended."""
    _, found, begun = text.rpartition(thought.opening)
    return begun.strip() if found and thought.end not in begun else None


def _form_of(request: ChatRequest, forms: AnswerForms) -> ToolForm | None:
    """Return the form of tool calls in an answer; None if there are none."""
    return forms.tools if request.tools or isinstance(forms.tools, ChannelForm) else None


def _choice_of(request: ChatRequest) -> tuple[Choice, list[tuple[int, Function]]]:
    """Return the choice among tools, and the functions that may be called with their indexes in `tools`."""
    functions = [(index, tool.function) for index, tool in enumerate(request.tools or ())]
    choice = request.tool_choice or "auto"
    if isinstance(choice, NamedTool):
        return "required", [entry for entry in functions if entry[1].name == choice.function.name]
    return choice, functions


def _parameters(
    index: int, function: Function, options: Mapping[str, Any]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the schema that is enforced for a function's arguments, and what of it is not. A function without
    parameters takes none.

    A keyword that cannot be read is not enforced, unless the function is strict. A schema that is too large as a whole
    is replaced by any object.

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
            check_constraint(ConstraintKind.JSON_SCHEMA, text)
            return enforced, what_is_left(ConstraintKind.JSON_SCHEMA, text, place, function.strict)
        except (ConstraintError, RecursionError) as error:
            reason = error
            if function.strict:
                why = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise InvalidRequestError(f"{place}: {why}", place) from error
    return {**_ANY_ARGUMENTS, OPTIONS: options}, (f"{place}: {reason}",)


def _is_open(request: ChatRequest, thought: Thought | None, prompt: str) -> bool:
    """Return whether an answer begins within reasoning."""
    if thought is None:
        return False
    if request.continue_final_message:
        begun = request.messages[-1].text or ""
        return thought.start in begun and begun.rfind(thought.start) > begun.rfind(thought.end)
    end = prompt.rstrip()
    return end.endswith(thought.opening.rstrip()) or (thought.always_open and not end.endswith(thought.end))


def _spent(request: ChatRequest, tokenizer: Tokenizer, thought: Thought | None) -> int:
    """Return the number of tokens of reasoning that the prompt ends with: those of a message that is continued."""
    if thought is None or not request.continue_final_message:
        return 0
    return len(tokenizer.encode(_begun(request.messages[-1].text or "", thought) or "", False))
