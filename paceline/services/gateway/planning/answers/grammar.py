"""The grammar of an answer: reasoning of bounded length first, then content in the wanted format, and tool calls.

The grammar is one constraint of kind GRAMMAR in llguidance's form of Lark, which workers enforce token by token. So a
call that has begun ends well formed, and a budget holds also for draft tokens, after a handoff and after a retry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.services.gateway.planning.answers.expressions import (
    ANY_TEXT,
    SPACE,
    Spelling,
    ToolSpelling,
    regex,
    without,
)
from paceline.services.gateway.planning.answers.form import ChannelForm, ReasoningMarks, ToolForm

Choice = Literal["none", "auto", "required"]


def answer_grammar(
    spelling: Spelling,
    *,
    thought: ReasoningMarks | None,
    is_open: bool,
    budget: int | None,
    form: ToolForm | None,
    tools: Sequence[ToolSpelling],
    choice: Choice,
    parallel: bool,
    content: str | None,
) -> str:
    """Return the grammar of an answer, in llguidance's form of Lark.

    Args:
        thought: how the model marks reasoning; None if it does not reason.
        is_open: whether the answer begins within reasoning.
        budget: the largest number of tokens of reasoning; None if there is no limit.
        form: how the model writes calls; None if there are no tools.
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
        triggers = form.triggers if form is not None else ()
        early_end = _early_end(spelling, thought, budget, triggers, may_call=choice != "none")
        # Models write line breaks after their reasoning. The parser drops them.
        is_text = isinstance(form, ChannelForm) or (content is None and choice != "required")
        space = "" if is_text else " SPACE"
        ended = f"(thinking{between}{space} body{' | early_end' if early_end else ''})"
        start = ended if is_open else f"thought_begin {ended} | body"
        rules.append(f"thought_begin: {spelling.literal(thought.opening)}")
        rules += [*_thinking(spelling, thought, budget, triggers), *early_end]
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


def _thinking(spelling: Spelling, thought: ReasoningMarks, budget: int | None, triggers: Sequence[str]) -> list[str]:
    """Return the rules for the reasoning after its start marker, the end marker included.

    Args:
        triggers: the texts that begin calls; reasoning contains none of them.
    """
    if budget == 0:
        return [f"thinking: {spelling.literal(thought.end)}"]
    limit = "" if budget is None else f"max_tokens={budget}"
    if spelling.is_token(thought.end):
        text, rule = _terminal("thought", limit, without(*triggers))
        return [f"thinking: {text} {spelling.literal(thought.end)}", rule]
    whole = without(*triggers, pattern=f"{ANY_TEXT}{regex(thought.end)}")
    if budget is None:
        return [f"thinking[lazy]: {whole}"]
    # The library finds no marker within text, so there are two ways: reasoning that ends by itself, with its marker
    # within the budget, and reasoning without a marker, which ends with the budget.
    cut_off = [f"cut_off[{limit}]: {without(thought.end, *triggers)}"]
    if budget == 1:
        return [f"thinking: cut_off {spelling.literal(thought.end)}", *cut_off]
    return [
        f"thinking: ended | cut_off {spelling.literal(thought.end)}",
        f"ended[lazy, max_tokens={budget - 1}]: {whole}",
        *cut_off,
    ]


def _early_end(
    spelling: Spelling, thought: ReasoningMarks, budget: int | None, triggers: Sequence[str], may_call: bool
) -> list[str]:
    """Return the rules for reasoning that ends without its end marker: with a call, or with the answer.

    When the budget is used up, only the end marker is possible, so that the model goes on with its answer. Return [] if
    the budget leaves no room for reasoning that ends earlier.
    """
    if budget is not None and budget < 2:
        return []
    limit = "" if budget is None else f"max_tokens={budget - 1}"
    tokens = [spelling.literal(trigger) for trigger in triggers if spelling.is_token(trigger)]
    texts = [regex(trigger) for trigger in triggers if not spelling.is_token(trigger)]
    text, rule = _terminal("open_thought", limit, without(thought.end, *triggers))
    ways, rules = [text], [rule]
    if may_call and tokens:
        ways.append(f"{text} ({' | '.join(tokens)}) first_calls")
    if may_call and texts:
        found = without(thought.end, pattern=f"{ANY_TEXT}({'|'.join(texts)})")
        text, rule = _terminal("thought_call", f"lazy, {limit}".removesuffix(", "), found)
        ways.append(f"{text} first_calls")
        rules.append(rule)
    return [f"early_end: {' | '.join(ways)}", *rules]


def _terminal(name: str, options: str, expression: str) -> tuple[str, str]:
    """Return the name and the rule of a terminal.

    A terminal with options has a name in lower case, which makes it a rule: the library takes options for rules alone.
    """
    return (name, f"{name}[{options}]: {expression}") if options else (name.upper(), f"{name.upper()}: {expression}")


def _body(
    spelling: Spelling,
    form: ToolForm | None,
    tools: Sequence[ToolSpelling],
    choice: Choice,
    parallel: bool,
    content: str | None,
    text: str,
) -> list[str]:
    """Return the rules for the answer after its reasoning: "body", and "first_calls" after the first call's trigger.

    Args:
        text: the expression of the terminal TEXT.
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
    space = "SPACE " if form.bare_start else ""
    more = f" (SPACE {begun} calls)*" if parallel and form.repeats and not form.bare_start else ""
    whole = f"SPACE ({begun} SPACE)? calls" if form.bare_start and form.triggers else f"{space or begun} calls{more}"
    if choice == "required" or content is not None:
        rules.append(f"first_calls: {space}calls{more}")
        return [*rules, f"body: {whole}" if choice == "required" else f"body: content | {whole}"]
    rules += _other_text("plain", form, text)
    texts = [trigger for trigger in form.triggers if not spelling.is_token(trigger)]
    opened = [f"plain {spelling.literal(trigger)}" for trigger in form.triggers if spelling.is_token(trigger)]
    if texts:
        rules += _other_text("head", form, text, f"({'|'.join(map(regex, texts))})", "lazy")
        opened.append("head")
    after = "call* plain" if parallel and form.repeats else "SPACE"
    rules += [f"call: ({' | '.join(opened)}) {space}calls", f"first_calls: {space}calls {after}"]
    if form.bare_start:
        return [*rules, f"body: plain | SPACE calls{' | call SPACE' if opened else ''}"]
    return [*rules, f"body: {after}" if parallel and form.repeats else "body: plain | call SPACE"]


def _other_text(name: str, form: ToolForm, text: str, end: str = "", options: str = "") -> list[str]:
    """Return the rules for text that does not begin like an answer which is nothing but calls.

    Args:
        name: the name of the rule.
        text: a terminal that the text must match, too.
        end: a regular expression for the end of the text.
        options: options of the terminals for the text, as in `_terminal`.
    """
    if not form.bare_start:
        terminal, rule = _terminal(f"{name}_", options, f"/{ANY_TEXT}{end}/ & {text}")
        return [f"{name}: {terminal}", rule]
    # Calls have one terminal for each of these expressions. A longer terminal for other text would hide them.
    rules, ways, before = [], [], r"/\s*/"
    for number, expression in enumerate(form.bare_start):
        other = f"/(\\S{ANY_TEXT})?{end}/ & ~/{expression}{ANY_TEXT}/ & {text}"
        terminal, rule = _terminal(f"{name}_{number}", options, other)
        rules.append(rule)
        ways.append(f"{before} {terminal}")
        before += rf" /{expression}/ /\s*/"
    return [f"{name}: {' | '.join(ways)}", *rules]
