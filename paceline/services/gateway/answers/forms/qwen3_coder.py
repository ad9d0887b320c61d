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
from typing import Any

from paceline.services.gateway.answers.answer import Answer
from paceline.services.gateway.answers.expressions import Spelling, Tool
from paceline.services.gateway.answers.form import ToolForm
from paceline.services.gateway.answers.forms.python_literals import PYTHON_WORDS
from paceline.services.gateway.answers.reader import FormError, Reader, Sink, Steps
from paceline.services.gateway.answers.schemas import (
    Rules,
    choices_of,
    escaped,
    json_schema,
    properties_of,
    resolve,
    type_of_text,
    types_of,
)

_NAME = re.compile(r"[^<>\n]*")
_SPACE = re.compile(r"\s*")
_END_OF_CALL = "</function>\n</tool_call>"
_END_OF_VALUE = "\n</parameter>\n"
_AFTER_PARAMETER = ("<parameter=", "</function>", "</tool_call>")
_ENDS_OF_VALUE = ("\n</parameter>", "</parameter>")


class Qwen3Coder(ToolForm):
    """See the module."""

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

    def write(self, name: str, arguments: str) -> str:
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None  # an answer that was cut off
        pairs = values.items() if isinstance(values, dict) else ()
        written = "".join(f"<parameter={key}>\n{_written(value)}\n</parameter>\n" for key, value in pairs)
        return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"

    def grammar(self, spelling: Spelling, tools: Sequence[Tool], parallel: bool) -> str:
        rules = Rules(spelling)
        functions = " | ".join(f"({_function(tool, rules)})" for tool in tools)
        return rules.after(f'"\\n" ({functions}) {spelling.literal(_END_OF_CALL)}')


def _read_function(answer: Answer) -> Steps[None]:
    """Read a function after its first tag has begun, up to its last tag."""
    reader = answer.reader
    name = yield from reader.match(_NAME)
    yield from reader.expect(">")
    if not name:
        raise FormError("the call has no name")
    add = answer.begin_call(name)
    tool = answer.tools.get(name)
    root = tool.parameters if tool is not None else {}
    properties = properties_of(resolve(root, root))
    separator = "{"
    while (yield from reader.pass_to_end(_AFTER_PARAMETER, lambda text: None)) == "<parameter=":
        pieces: list[str] = []
        yield from reader.pass_to_end((">",), pieces.append)
        key = "".join(pieces)
        add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from reader.choose(("\n",))
        yield from _read_value(reader, add, types_of(properties.get(key, ({}, False))[0], root))
        separator = ", "
    add("{}" if separator == "{" else "}")


def _read_value(reader: Reader, add: Sink, types: frozenset[str]) -> Steps[None]:
    """Read a value with its end, and pass it on as JSON of one of these types."""
    if types == {"string"}:
        add('"')
        yield from _pass_value(reader, lambda text: add(escaped(text)))
        add('"')
    else:
        pieces: list[str] = []
        yield from _pass_value(reader, pieces.append)
        add(_json_of("".join(pieces), types))


def _pass_value(reader: Reader, sink: Sink) -> Steps[None]:
    """Pass the text of a value, and read its end. An end that another tag does not follow is a part of the text."""
    while True:
        end = yield from reader.pass_to_end(_ENDS_OF_VALUE, sink)
        reader.keep()
        yield from reader.match(_SPACE)
        follows = yield from reader.choose(_AFTER_PARAMETER)
        reader.restore()
        if follows is not None or reader.has_ended:
            return
        sink(end)


def _json_of(text: str, types: frozenset[str]) -> str:
    """Return the text of a value as JSON of one of these types. Without types, it is JSON if it can be read so."""
    value = text.strip()
    if types & {"boolean", "null"}:
        value = PYTHON_WORDS.get(value, value)
    found = type_of_text(value)
    if "string" not in types:
        return value if found is not None else json.dumps(text, ensure_ascii=False)
    fits = found in types or (found == "integer" and "number" in types)
    return value if fits and found != "string" else json.dumps(text, ensure_ascii=False)


def _written(value: object) -> str:
    # The model writes texts as they are. The tool's schema says that "0" is a text.
    if isinstance(value, str) and "</parameter>" not in value:
        return value
    # JSON can spell an end tag differently.
    return json.dumps(value, ensure_ascii=False).replace("</parameter>", "\\u003c/parameter>")


def _function(tool: Tool, rules: Rules) -> str:
    """Return an expression for a function up to its last tag."""
    root = tool.parameters
    properties = properties_of(resolve(root, root))
    parameters = []
    for key, (schema, is_required) in properties.items():
        begin = rules.spelling.literal(f"<parameter={key}>\n")
        parameters.append(f"({begin} {_value(schema, root, rules)}){'' if is_required else '?'}")
    whole = resolve(root, root)
    if not properties and whole.get("additionalProperties", "properties" not in whole) is not False:
        parameters.append(rf'("<parameter=" /[^<>\n]{{1,64}}/ ">\n" {rules.text({}, _END_OF_VALUE)})*')
    return " ".join([rules.spelling.literal(f"<function={tool.name}>\n"), *parameters])


def _value(schema: object, root: Mapping[str, Any], rules: Rules) -> str:
    """Return an expression for a value and its end."""
    resolved = resolve(schema, root)
    if (values := choices_of(resolved)) is not None:
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        return "(" + " | ".join(rules.spelling.literal(text + _END_OF_VALUE) for text in texts) + ")"
    types = types_of(resolved, root)
    if not types or "string" in types:
        return rules.text(resolved if types == {"string"} else {}, _END_OF_VALUE)
    return f"{rules.add(json_schema(resolved, root))} {rules.spelling.literal(_END_OF_VALUE)}"
