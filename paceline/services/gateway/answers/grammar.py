"""The grammar of an answer: reasoning of bounded length first, then content in the wanted format, and tool calls.

All of it is one constraint of kind GRAMMAR in llguidance's form of Lark, which workers enforce token by token. So a
call that has begun ends well formed, and a budget holds, also for drafts, after a handoff and after a retry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.services.gateway.answers.expressions import ANY_TEXT, Spelling, Tool, regex, without
from paceline.services.gateway.answers.form import Thought, ToolForm

Choice = Literal["none", "auto", "required"]

_SPACE = r"/[ \n\r\t]{0,8}/"


def answer_grammar(
    spelling: Spelling,
    *,
    thought: Thought | None,
    is_open: bool,
    budget: int | None,
    form: ToolForm | None,
    tools: Sequence[Tool],
    choice: Choice,
    parallel: bool,
    content: str | None,
) -> str:
    """Return the grammar of an answer.

    Args:
        is_open: whether the answer begins within reasoning.
        budget: the largest number of tokens of reasoning; None if there is no limit.
        form: how calls are written; None if there are no tools.
        choice: "none" allows no call, "required" nothing but calls.
        parallel: whether there may be more than one call.
        content: an expression for the content; None if it may be any text.
    """
    rules: list[str] = []
    start = "body"
    # If markers are text, content could hold reasoning, and that would have no budget.
    excluded = [] if budget is None or thought is None or spelling.is_token(thought.start) else [thought.start]
    if thought is not None:
        start = "thinking body" if is_open else "(thought_begin thinking)? body"
        rules.append(f"thought_begin: {spelling.literal(thought.start)}")
        rules += _thinking(spelling, thought, budget)
    rules += _body(spelling, form, tools, choice, parallel, content, excluded)
    return "\n".join([f"start: {start}", *rules, f"TEXT: {without(*excluded)}", f"SPACE: {_SPACE}", ""])


def _thinking(spelling: Spelling, thought: Thought, budget: int | None) -> list[str]:
    """Return the rules for reasoning after its start, the marker at its end included."""
    if budget == 0:
        return [f"thinking: {spelling.literal(thought.end)}"]
    limit = f"max_tokens={budget}"
    if spelling.is_token(thought.end):
        rule = "thought" if budget is None else f"thought[{limit}]"
        return [f"thinking: thought {spelling.literal(thought.end)}", f"{rule}: /{ANY_TEXT}/"]
    whole = f"/{ANY_TEXT}{regex(thought.end)}/"
    if budget is None:
        return [f"thinking[lazy]: {whole}"]
    # The library finds no marker within text, so there are two ways: reasoning that ends by itself, with its marker
    # within the budget, and reasoning without a marker, which ends with the budget.
    cut_off = [f"cut_off[{limit}]: {without(thought.end)}"]
    if budget == 1:
        return [f"thinking: cut_off {spelling.literal(thought.end)}", *cut_off]
    return [
        f"thinking: ended | cut_off {spelling.literal(thought.end)}",
        f"ended[lazy, max_tokens={budget - 1}]: {whole}",
        *cut_off,
    ]


def _body(
    spelling: Spelling,
    form: ToolForm | None,
    tools: Sequence[Tool],
    choice: Choice,
    parallel: bool,
    content: str | None,
    excluded: Sequence[str],
) -> list[str]:
    """Return the rules for what comes after reasoning. Texts that are excluded are no content."""
    rules = [] if content is None else [f"content: {content}"]
    if form is None:
        return [*rules, f"body: {'TEXT' if content is None else 'content'}"]
    if choice == "none":
        triggers = [form.trigger] if form.trigger and not spelling.is_token(form.trigger) else []
        no_call = f" & ~/{form.bare_start}{ANY_TEXT}/" if form.bare_start else ""
        plain = without(*triggers, *excluded) + no_call
        return [*rules, f"PLAIN: {plain}", f"body: {'PLAIN' if content is None else 'content'}"]
    rules.append(f"calls: {form.grammar(spelling, tools, parallel)}")
    if form.bare_start:
        rules.append(f"PLAIN: {without(*excluded)} & ~/{form.bare_start}{ANY_TEXT}/")
        other = "PLAIN" if content is None else "content"
        return [*rules, "body: calls" if choice == "required" else f"body: calls | {other}"]
    call = f"{spelling.literal(form.trigger)} calls"
    again = f"(SPACE {call})*" if parallel and form.repeats else ""
    if choice == "required":
        return [*rules, f"body: {call} {again}"]
    if content is not None:
        return [*rules, f"body: content | {call} {again}"]
    if spelling.is_token(form.trigger):
        rules.append(f"call: TEXT {call}")
    else:
        rules += ["call: head calls", f"head[lazy]: {without(*excluded, pattern=ANY_TEXT + regex(form.trigger))}"]
    if parallel and form.repeats:
        return [*rules, "body: call* TEXT"]
    return [*rules, "body: TEXT | call SPACE"]
