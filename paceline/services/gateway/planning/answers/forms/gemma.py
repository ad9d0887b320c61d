"""FunctionGemma and Gemma 4: arguments are objects with unquoted keys, and strings stand between special tokens.

<start_function_call>call:find{text:<escape>rain<escape>,limits:{days:3}}<end_function_call>
<|tool_call>call:find{text:<|"|>rain<|"|>,limits:{days:3}}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from paceline.core.json_grammar.parameters import PYTHON_WORDS, type_of_text
from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Notation, Spelling, ToolSpelling, escaped, schema
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.reader import FormError, Reader, Sink, Steps

_FUNCTION = re.compile(r"[^\s{}<]*")
_KEY = re.compile(r"[^:,{}\[\]<]*")
_SCALAR = re.compile(r"[^,{}\[\]<]*")
_CLOSING = {"{": "}", "[": "]"}
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class FunctionGemma(ToolForm):
    """Calls as objects with unquoted keys; see the module."""

    name = "functiongemma"
    trigger = "<start_function_call>"
    end = "<end_function_call>"
    quote = "<escape>"
    markers: tuple[str, ...] = (trigger, end, quote)

    def read(self, answer: Answer) -> Steps[None]:
        reader = answer.reader
        yield from reader.skip_space()
        yield from reader.expect("call:")
        name = yield from reader.match(_FUNCTION)
        yield from reader.skip_space()
        yield from reader.expect("{")
        if not name:
            raise FormError("the call has no name")
        yield from self._pass_object(reader, answer.begin_call(name))
        yield from reader.skip_space()
        yield from reader.choose((self.end,))

    def write(self, name: str, arguments: str) -> str:
        try:
            text = _written(json.loads(arguments), self.quote)
        except (ValueError, RecursionError):
            text = arguments  # an answer that was cut off
        return f"{self.trigger}call:{name}{text}{self.end}"

    def notation(self, spelling: Spelling) -> Notation:
        token = spelling.literal(self.quote) if spelling.is_token(self.quote) else ""
        return {"notation": ["gemma", self.quote, token]}

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        notation = self.notation(spelling)
        calls = " | ".join(f"{spelling.literal(f'call:{tool.name}')} {schema(tool, notation)}" for tool in tools)
        return f"({calls}) {spelling.literal(self.end)}"

    def _pass_object(self, reader: Reader, add: Sink) -> Steps[None]:
        """Pass an object after its first bracket to `add` as JSON. Text that fits no object ends the object."""
        open_brackets = ["{"]
        add("{")
        try:
            yield from self._pass_members(reader, add, open_brackets)
        except FormError:
            add("".join(_CLOSING[bracket] for bracket in reversed(open_brackets)))

    def _pass_members(self, reader: Reader, add: Sink, open_brackets: list[str]) -> Steps[None]:
        """Pass the remaining members of all open objects and lists to `add` as JSON."""
        separator = ""
        while open_brackets:
            yield from reader.skip_space()
            mark = yield from reader.choose((",", "}", "]"))
            if mark == ",":
                continue
            if mark is not None:
                add(_CLOSING[open_brackets.pop()])
                separator = ", "
                continue
            before = separator
            if open_brackets[-1] == "{":
                before += yield from self._key(reader)
            separator = ", "
            bracket = yield from reader.choose(("{", "["))
            if bracket is not None:
                add(before + bracket)
                open_brackets.append(bracket)
                separator = ""
            else:
                yield from self._pass_scalar(reader, add, before)

    def _key(self, reader: Reader) -> Steps[str]:
        """Read a key and the colon after it. Return both as JSON text."""
        if (yield from self._begins_text(reader)):
            pieces: list[str] = []
            yield from reader.pass_to_end((self.quote,), pieces.append)
            key = "".join(pieces)
        elif (yield from reader.peek()) == '"':
            key = yield from reader.json_string()
        else:
            key = (yield from reader.match(_KEY)).strip()
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        return f"{json.dumps(key, ensure_ascii=False)}: "

    def _pass_scalar(self, reader: Reader, add: Sink, before: str) -> Steps[None]:
        """Pass a string while it comes, or another value without brackets when it is complete.

        Args:
            before: what is added before the value.
        """
        if (yield from self._begins_text(reader)):
            add(f'{before}"')
            yield from reader.pass_to_end((self.quote,), lambda text: add(escaped(text)))
            add('"')
            return
        if (yield from reader.peek()) == '"':  # as in JSON
            text = yield from reader.json_string()
            add(before + json.dumps(text, ensure_ascii=False))
            return
        text = (yield from reader.match(_SCALAR)).strip()
        yield from reader.peek()  # a value is complete if something follows
        text = PYTHON_WORDS.get(text, text) or "null"
        add(before + (text if type_of_text(text) is not None else json.dumps(text, ensure_ascii=False)))

    def _begins_text(self, reader: Reader) -> Steps[bool]:
        """Read the marker before a string, if there is one. Return whether there is one."""
        if (yield from reader.peek()) != self.quote[0]:
            return False
        yield from reader.expect(self.quote)
        return True


class Gemma4Form(FunctionGemma):
    """Calls as objects with unquoted keys; see the module."""

    name = "gemma4"
    trigger = "<|tool_call>"
    end = "<tool_call|>"
    quote = '<|"|>'
    markers = (trigger, end, quote)


def _written(value: object, quote: str) -> str:
    """Return a JSON value as the model writes it.

    Args:
        quote: the marker before and after a string.
    """
    match value:
        case str():
            if quote not in value:
                return f"{quote}{value}{quote}"
            # A text with the marker in it is written as in JSON, in which the marker can be spelled differently.
            return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
        case list():
            return f"[{','.join(_written(item, quote) for item in value)}]"
        case dict():
            members = (f"{_key_of(key, quote)}:{_written(each, quote)}" for key, each in value.items())
            return f"{{{','.join(members)}}}"
    return json.dumps(value)


def _key_of(key: str, quote: str) -> str:
    """Return a key as the model writes it: without quotes if it is a plain name."""
    return key if _BARE_KEY.fullmatch(key) else _written(key, quote)
