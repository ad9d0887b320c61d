"""Qwen3-Coder: a tag for the function and one for each parameter. The types of values follow from the tool's schema.

<tool_call>
<function=find>
<parameter=text>
rain
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from paceline.core.json_grammar.parameters import ANY_TYPES, ArgumentTypes, argument_types, json_of
from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Notation, Spelling, ToolSpelling, escaped, schema
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.reader import FormError, Reader, Sink, Steps

_NAME = re.compile(r"[^<>\n]*")
_SPACE = re.compile(r"\s*")
_NOTATION: Notation = {"notation": ["parameters"]}
_FUNCTION = "<function={}>\n"
_END_OF_CALL = "</function>\n</tool_call>"
_AFTER_PARAMETER = ("<parameter=", "</function>", "</tool_call>")
_ENDS_OF_VALUE = ("\n</parameter>", "</parameter>")


class Qwen3Coder(ToolForm):
    """Calls with a tag for the function and one for each parameter; see the module."""

    name = "qwen3_coder"
    trigger = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def begins(self, reader: Reader) -> Steps[bool]:
        # The model sometimes leaves the first tag out.
        yield from reader.skip_space()
        return (yield from reader.choose(("<function=",))) is not None

    def read(self, answer: Answer) -> Steps[None]:
        reader = answer.reader
        yield from reader.skip_space()
        yield from reader.expect("<function=")
        more: str | None = "<function="
        while more == "<function=":
            yield from _read_function(answer)
            yield from reader.skip_space()
            more = yield from reader.choose(("<function=", "</tool_call>"))

    def argument_types(self, tools: Sequence[ToolSpelling]) -> Mapping[str, ArgumentTypes]:
        return {tool.name: argument_types(tool.parameters) for tool in tools}

    def write(self, name: str, arguments: str) -> str:
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None  # an answer that was cut off
        pairs = values.items() if isinstance(values, dict) else ()
        written = "".join(f"<parameter={key}>\n{_written(value)}\n</parameter>\n" for key, value in pairs)
        return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"

    def notation(self, spelling: Spelling) -> Notation:
        return _NOTATION

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        functions = " | ".join(
            f"{spelling.literal(_FUNCTION.format(tool.name))} {schema(tool, _NOTATION)}" for tool in tools
        )
        return f'"\\n" ({functions}) {spelling.literal(_END_OF_CALL)}'


def _read_function(answer: Answer) -> Steps[None]:
    """Read a called function with its parameters, after the beginning of its first tag and up to its last tag."""
    reader = answer.reader
    name = yield from reader.match(_NAME)
    yield from reader.expect(">")
    if not name:
        raise FormError("the call has no name")
    add = answer.begin_call(name)
    types = answer.tools.get(name, ANY_TYPES)
    separator = "{"
    while (yield from reader.pass_to_end(_AFTER_PARAMETER, lambda text: None)) == "<parameter=":
        pieces: list[str] = []
        yield from reader.pass_to_end((">",), pieces.append)
        key = "".join(pieces)
        add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from reader.choose(("\n",))
        yield from _read_value(reader, add, types.of(key))
        separator = ", "
    add("{}" if separator == "{" else "}")


def _read_value(reader: Reader, add: Sink, types: frozenset[str]) -> Steps[None]:
    """Read a parameter's value with its closing tag, and pass the value on as JSON of one of these types."""
    if types == {"string"}:
        add('"')
        yield from _pass_value(reader, lambda text: add(escaped(text)))
        add('"')
    else:
        pieces: list[str] = []
        yield from _pass_value(reader, pieces.append)
        add(json_of("".join(pieces), types))


def _pass_value(reader: Reader, sink: Sink) -> Steps[None]:
    """Pass a value's text, and read its closing tag. A closing tag that no other tag follows belongs to the text."""
    while True:
        end = yield from reader.pass_to_end(_ENDS_OF_VALUE, sink)
        reader.keep()
        yield from reader.match(_SPACE)
        follows = yield from reader.choose(_AFTER_PARAMETER)
        reader.restore()
        if follows is not None or reader.has_ended:
            return
        sink(end)


def _written(value: object) -> str:
    # The model writes texts as they are. The tool's schema says that "0" is a text.
    if isinstance(value, str) and "</parameter>" not in value:
        return value
    # JSON can spell an end tag differently.
    return json.dumps(value, ensure_ascii=False).replace("</parameter>", "\\u003c/parameter>")
