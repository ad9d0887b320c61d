"""The grammar of an answer: reasoning of bounded length first, then content in the wanted format, and tool calls.

All of it is one constraint of kind GRAMMAR in llguidance's form of Lark, which workers enforce token by token. So a
call that has begun ends well formed, and a budget holds, also for drafts, after a handoff and after a retry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.services.gateway.answers.expressions import ANY_TEXT, SPACE, Spelling, Tool, regex, without
from paceline.services.gateway.answers.form import ChannelForm, Thought, ToolForm

Choice = Literal["none", "auto", "required"]


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
    # Without this, all reasoning whose markers are no tokens of their own would also be text.
    text = without(thought.start) if thought is not None else without()
    if thought is not None:
        between = f" {spelling.literal(form.between)}" if isinstance(form, ChannelForm) else ""
        start = f"thinking{between} body" if is_open else f"(thought_begin thinking{between})? body"
        rules.append(f"thought_begin: {spelling.literal(thought.opening)}")
        rules += _thinking(spelling, thought, budget)
    if isinstance(form, ChannelForm):
        rules += [] if content is None else [f"content: {content}"]
        rules += form.rules(
            spelling,
            tools,
            may_call=choice != "none" and bool(tools),
            must_call=choice == "required",
            may_think=budget is None,
            content=None if content is None else "content",
        )
    else:
        rules += _body(spelling, form, tools, choice, parallel, content, text)
    return "\n".join([f"start: {start}", *rules, f"TEXT: {text}", f"SPACE: /{SPACE}/", ""])


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
    text: str,
) -> list[str]:
    """Return the rules for what comes after reasoning.

    Args:
        text: the terminal TEXT.
    """
    rules = [] if content is None else [f"content: {content}"]
    if form is None:
        return [*rules, f"body: {'TEXT' if content is None else 'content'}"]
    if choice == "none":
        if content is not None:
            return [*rules, "body: content"]
        return [*rules, "body: plain", *_other_text("plain", form, f"{text} & {without(*form.triggers)}")]
    rules.append(f"calls: {form.grammar(spelling, tools, parallel)}")
    begun = f"({' | '.join(map(spelling.literal, form.triggers))})"
    whole = f"{begun} calls"
    if form.bare_start:
        whole = f"SPACE ({begun} SPACE)? calls" if form.triggers else "SPACE calls"
    elif parallel and form.repeats:
        whole += f" (SPACE {begun} calls)*"
    if choice == "required":
        return [*rules, f"body: {whole}"]
    if content is not None:
        return [*rules, f"body: content | {whole}"]
    rules += _other_text("plain", form, text)
    texts = [trigger for trigger in form.triggers if not spelling.is_token(trigger)]
    opened = [f"plain {spelling.literal(trigger)}" for trigger in form.triggers if spelling.is_token(trigger)]
    if texts:
        rules += _other_text("head", form, text, f"({'|'.join(map(regex, texts))})", "[lazy]")
        opened.append("head")
    rules.append(f"call: ({' | '.join(opened)}) {'SPACE' if form.bare_start else ''} calls")
    if form.bare_start:
        return [*rules, f"body: plain | SPACE calls{' | call SPACE' if opened else ''}"]
    return [*rules, "body: call* plain" if parallel and form.repeats else "body: plain | call SPACE"]


def _other_text(name: str, form: ToolForm, text: str, end: str = "", options: str = "") -> list[str]:
    """Return a rule for text that is not the beginning of a whole answer of calls.

    Args:
        name: the name of the rule.
        text: a terminal that the text must match, too.
        end: a regular expression for the end of the text.
        options: options of the terminals for the text.
    """
    terminal = f"{name}_" if options else f"{name.upper()}_"  # only rules have options
    if not form.bare_start:
        return [f"{name}: {terminal}", f"{terminal}{options}: /{ANY_TEXT}{end}/ & {text}"]
    # Calls have one terminal for each of these expressions. A longer terminal for other text would hide them.
    rules, ways, before = [], [], r"/\s*/"
    for number, expression in enumerate(form.bare_start):
        other = f"/(\\S{ANY_TEXT})?{end}/ & ~/{expression}{ANY_TEXT}/ & {text}"
        rules.append(f"{terminal}{number}{options}: {other}")
        ways.append(f"{before} {terminal}{number}")
        before += rf" /{expression}/ /\s*/"
    return [f"{name}: {' | '.join(ways)}", *rules]
