"""DeepSeek V3, R1 and V3.1: markers around all calls, around each call, and between its parts.

V3: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find
```json
{"text": "rain"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"count": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Spelling, ToolSpelling, schema
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.reader import FormError, Steps

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_WORD = re.compile(r"[^\s<{`]*")

_V3 = (f"function{_SEPARATOR}", "\n```json\n", "\n```")
_V31 = ("", _SEPARATOR, "")
"""The texts before the name of a call, between its name and its arguments, and after its arguments."""


class DeepSeek(ToolForm):
    """Calls of DeepSeek V3, R1 and V3.1. Either form is read, whichever the model writes; see the module."""

    name = "deepseek"
    trigger = _BEGIN
    markers = (_BEGIN, _END, _CALL_BEGIN, _CALL_END, _SEPARATOR)
    repeats = False
    shapes: tuple[tuple[str, str, str], ...] = (_V31, _V3)
    """The forms in which a call is read. Calls in prompts are written in the first form."""

    def read(self, answer: Answer) -> Steps[None]:
        reader = answer.reader
        yield from reader.skip_space()
        yield from reader.expect(_CALL_BEGIN)
        more = True
        while more:
            yield from _read_call(answer)
            yield from reader.skip_space()
            more = (yield from reader.expect(_CALL_BEGIN, _END)) == _CALL_BEGIN

    def write(self, name: str, arguments: str) -> str:
        return self.write_all([(name, arguments)])

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        before, between, after = self.shapes[0]
        written = (f"{_CALL_BEGIN}{before}{name}{between}{text}{after}{_CALL_END}" for name, text in calls)
        return f"{_BEGIN}{''.join(written)}{_END}"

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        calls = (
            f"{spelling.literal(before + tool.name + between)} {schema(tool)} {spelling.literal(after + _CALL_END)}"
            for before, between, after in self.shapes
            for tool in tools
        )
        more = "(SPACE form_call)*" if parallel else ""
        return (
            f"form_call {more} SPACE {spelling.literal(_END)}\n"
            f"form_call: {spelling.literal(_CALL_BEGIN)} ({' | '.join(calls)})"
        )


class DeepSeekV3(DeepSeek):
    """Calls in the form of V3 and R1: arguments in a code block of JSON."""

    name = "deepseek_v3"
    shapes = (_V3,)


class DeepSeekV31(DeepSeek):
    """Calls in the form of V3.1: arguments as plain JSON."""

    name = "deepseek_v31"
    shapes = (_V31,)


def _read_call(answer: Answer) -> Steps[None]:
    """Read a call after its first marker, its last marker included."""
    reader = answer.reader
    name = yield from reader.match(_WORD)
    yield from reader.skip_space()
    yield from reader.expect(_SEPARATOR)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":  # V3: before the marker there is the type of the tool
        name = yield from reader.match(_WORD)
        yield from reader.skip_space()
        yield from reader.choose(("```json", "```"))
        yield from reader.skip_space()
    if not name or (yield from reader.peek()) != "{":
        raise FormError("the call has no name or no arguments")
    yield from reader.pass_json(answer.begin_call(name))
    yield from reader.skip_space()
    yield from reader.choose(("```",))
    yield from reader.skip_space()
    yield from reader.choose((_CALL_END,))
