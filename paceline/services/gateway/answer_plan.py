"""How one request's answers are read. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from paceline.services.gateway.answers.answer import Answer, new_call_id
from paceline.services.gateway.answers.expressions import Tool
from paceline.services.gateway.answers.form import ChannelForm
from paceline.services.gateway.answers.parser import read_answer
from paceline.services.gateway.answers.reader import Steps
from paceline.services.gateway.answers.registry import AnswerForms
from paceline.services.gateway.constraints.fields import begins_in_reasoning
from paceline.services.gateway.schemas import ChatRequest
from paceline.services.gateway.tokenizer import Tokenizer


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
    thought, form = forms.thought, forms.tools if request.tools or isinstance(forms.tools, ChannelForm) else None
    if form is None and thought is None:
        return None
    functions = [tool.function for tool in request.tools or ()]
    given = [Tool(function.name, function.parameters or {}) for function in functions]
    tools = form.argument_types(given) if form is not None else {}
    markers = [*(form.markers if form is not None else ()), *((thought.start, thought.end) if thought else ())]
    is_open = begins_in_reasoning(request, thought, prompt)
    read = functools.partial(read_answer, thought=thought, form=form, is_open=is_open, tools=tools)
    kept = tokenizer.vocabulary.spelling.tokens("".join(markers))
    return AnswerPlan(read, kept, form.new_call_id if form is not None else new_call_id)
