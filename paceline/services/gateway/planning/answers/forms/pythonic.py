"""Calls in Python's syntax: Llama 4, OLMo 3, and models that are prompted for it.

[find(text="rain", count=3), stop()]

Llama 4 may write markers around the list. OLMo 3 writes markers, and in place of a list one call a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from paceline.core.json_grammar.strings import quoted
from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Notation, Spelling, ToolSpelling, schema
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.forms.python_literals import (
    KEY,
    pass_literal,
    pass_string,
    write_key,
    write_literal,
)
from paceline.services.gateway.planning.answers.reader import FormError, Reader, Sink, Steps

_NAME = re.compile(r"[\w.-]*")
_NOTATION: Notation = {"notation": ["python"]}


class Pythonic(ToolForm):
    """A list that is the whole answer; see the module."""

    name = "pythonic"
    bare_start: tuple[str, ...] = (r"\[", r"[\w.-]+\(")
    repeats = False
    end = ""
    """The marker after the calls; "" if there is none."""

    def begins(self, reader: Reader) -> Steps[bool]:
        yield from reader.skip_space()
        if (yield from reader.choose(("[",))) is None:
            return False
        yield from reader.skip_space()
        name = yield from reader.match(_NAME)
        return bool(name) and (yield from reader.choose(("(",))) is not None

    def read(self, answer: Answer) -> Steps[None]:
        reader = answer.reader
        ends = tuple(filter(None, (self.end,)))
        yield from reader.skip_space()
        yield from reader.choose(("[",))
        yield from reader.skip_space()
        while (ended := (yield from reader.choose(("]", *ends)))) is None:
            yield from _read_call(answer)
            yield from reader.skip_space()
            yield from reader.choose((",",))
            yield from reader.skip_space()
        if ended == "]":
            yield from reader.skip_space()
            yield from reader.choose(ends)

    def write(self, name: str, arguments: str) -> str:
        return self.write_all([(name, arguments)])

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        return f"{self.trigger}[{', '.join(_written(name, arguments) for name, arguments in calls)}]{self.end}"

    def notation(self, spelling: Spelling) -> Notation:
        return _NOTATION

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        more = '(SPACE "," SPACE form_call)*' if parallel else ""
        end = f"(SPACE {spelling.literal(self.end)})?" if self.end else ""
        return f'"[" SPACE form_call {more} SPACE "]" {end}\n{_call_rule(tools)}'


class Llama4Pythonic(Pythonic):
    """The form of Llama 4; see the module."""

    name = "llama4_pythonic"
    trigger = "<|python_start|>"
    end = "<|python_end|>"
    markers = (trigger, end)


class Olmo3(Pythonic):
    """The form of OLMo 3; see the module."""

    name = "olmo3"
    trigger = "<function_calls>"
    end = "</function_calls>"
    markers = (trigger, end)
    bare_start = ()

    def begins(self, reader: Reader) -> Steps[bool]:
        return False
        yield

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        return self.trigger + "\n".join(_written(name, arguments) for name, arguments in calls) + self.end

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        more = r"(/\n{1,8}/ form_call)*" if parallel else ""
        return f"SPACE form_call {more} SPACE {spelling.literal(self.end)}\n{_call_rule(tools)}"


def _call_rule(tools: Sequence[ToolSpelling]) -> str:
    """Return the rule for a call of one of these tools."""
    calls = (f'{quoted(f"{tool.name}(")} {schema(tool, _NOTATION)} ")"' for tool in tools)
    return f"form_call: {' | '.join(calls)}"


def _read_call(answer: Answer) -> Steps[None]:
    """Read a call. It begins once its first argument has, because other text may look the same until then."""
    reader = answer.reader
    name = yield from reader.match(_NAME)
    yield from reader.expect("(")
    if not name:
        raise FormError("the call has no name")
    yield from reader.skip_space()
    add: Sink | None = None
    while (yield from reader.choose((")",))) is None:
        key = yield from _read_key(reader)
        yield from reader.skip_space()
        yield from reader.expect("=")
        if add is None:
            add = answer.begin_call(name)
            add(f"{{{key}: ")
        else:
            add(f", {key}: ")
        yield from pass_literal(reader, add)
        yield from reader.skip_space()
        yield from reader.choose((",",))
        yield from reader.skip_space()
    if add is None:
        answer.begin_call(name)("{}")
    else:
        add("}")


def _read_key(reader: Reader) -> Steps[str]:
    """Read the name of an argument, and return it as JSON text."""
    if (yield from reader.peek()) in "\"'":
        pieces: list[str] = []
        yield from pass_string(reader, pieces.append)
        return "".join(pieces)
    return json.dumps((yield from reader.match(KEY)), ensure_ascii=False)


def _written(name: str, arguments: str) -> str:
    try:
        values = json.loads(arguments)
        pairs = values.items() if isinstance(values, dict) else ()
        written = [f"{write_key(key)}={write_literal(value)}" for key, value in pairs]
    except (ValueError, RecursionError):
        written = []  # an answer that was cut off, or nested too deeply
    return f"{name}({', '.join(written)})"
