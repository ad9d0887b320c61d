"""Calls in Python's syntax: Llama 4, OLMo 3, and models that are prompted for it.

[find(text="rain", count=3), stop()]

Llama 4 may write markers around the list. OLMo 3 writes markers, and one call per line instead of a list. Arguments are
Python literals; JSON's spelling of words is read, too: `true` for `True`, `null` for `None`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from paceline.core.json_grammar.parameters import PYTHON_WORDS
from paceline.core.json_grammar.strings import quoted
from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Notation, Spelling, ToolSpelling, escaped, schema
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.reader import FormError, Reader, Sink, Steps

KEY = re.compile(r"[\w.$@/-]*")
"""The name of an argument without quotes. Tools may use names that are not identifiers in Python."""

_WORDS = {**PYTHON_WORDS, **{word: word for word in PYTHON_WORDS.values()}}
_WORD = re.compile(r"""[^\s,()\[\]{}:="']*""")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Number of hexadecimal digits after the letter of an escape."""

_NAME = re.compile(r"[\w.-]*")
_NOTATION: Notation = {"notation": ["python"]}


def pass_literal(reader: Reader, sink: Sink) -> Steps[None]:
    """Pass one Python literal to a sink as JSON text, while it comes. Tuples become lists, and unknown words strings.

    Raises:
        FormError: the text is no literal.
        EndOfAnswerError: the answer ends within the literal. Its beginning has been passed.
    """
    expected: list[str] = []
    """The closing bracket for each open bracket."""
    before = ""
    """The JSON text between the last value and the next one. It is passed when the next value begins."""
    while True:
        yield from reader.skip_space()
        first = yield from reader.peek()
        is_key = expected[-1:] == ["}"] and before != ": "
        if expected and first == expected[-1] and before != ": ":
            yield from reader.take()
            sink("}" if expected.pop() == "}" else "]")
            is_key = False
        else:
            sink(before)
            before = ""
            if first in _CLOSING and not is_key:
                yield from reader.take()
                sink("{" if first == "{" else "[")
                expected.append(_CLOSING[first])
                continue
            yield from _pass_scalar(reader, sink, is_key)
        if not expected:
            return
        between = ":" if is_key else ","
        yield from reader.skip_space()
        if (yield from reader.choose((between,))) is not None:
            before = f"{between} "
        elif is_key or (yield from reader.peek()) != expected[-1]:
            raise FormError(f"{between!r} is missing")


def pass_string(reader: Reader, sink: Sink) -> Steps[None]:
    """Pass a Python string to a sink as a JSON string, while it comes. Raises the errors of `pass_literal`."""

    quote = yield from reader.take()
    sink('"')
    while (yield from reader.pass_to_end((quote, "\\"), lambda text: sink(escaped(text)))) != quote:
        yield from _pass_escape(reader, sink)
    sink('"')


def write_literal(value: Any) -> str:
    """Return a JSON value as a Python literal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_literal(name)}: {write_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def write_key(name: str) -> str:
    """Return the name of an argument, in quotes if `KEY` does not match the whole name."""
    return name if name and KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _pass_scalar(reader: Reader, sink: Sink, is_key: bool) -> Steps[None]:
    if (yield from reader.peek()) in "\"'":
        yield from pass_string(reader, sink)
        return
    word = yield from reader.match(_WORD)
    if not word:
        raise FormError("a value is missing")
    yield from reader.peek()  # at the end of the answer the word may be half a word
    sink(json.dumps(word, ensure_ascii=False) if is_key else _to_json(word))


def _to_json(word: str) -> str:
    """Return the JSON text of a word or number. Numbers in a spelling that only Python has are spelled anew."""
    if word in _WORDS:
        return _WORDS[word]
    number = re.sub(r"^\+|_", "", word)
    number = re.sub(r"\.(?![0-9])", ".0", re.sub(r"^(-?)\.", r"\g<1>0.", number))
    return number if _JSON_NUMBER.fullmatch(number) else json.dumps(word, ensure_ascii=False)


def _pass_escape(reader: Reader, sink: Sink) -> Steps[None]:
    """Pass the character of an escape, whose backslash has been read, as JSON text."""
    character = yield from reader.take()
    if character in '\\"bfnrt':
        sink("\\" + character)
    elif character in "'/":
        sink(character)
    elif character in _DIGITS:
        digits = yield from reader.match(re.compile(f"[0-9a-fA-F]{{0,{_DIGITS[character]}}}"))
        if len(digits) < _DIGITS[character]:
            yield from reader.peek()  # at the end of the answer more digits may be missing
        code = int(digits, 16) if len(digits) == _DIGITS[character] else None
        if code is None or code > 0x10FFFF:
            sink(escaped(f"\\{character}{digits}"))
        else:
            sink(json.dumps(chr(code))[1:-1])
    elif character != "\n":  # a backslash at the end of a line joins it with the next one
        sink(escaped(f"\\{character}"))


class Pythonic(ToolForm):
    """Calls as a Python list that is the whole answer; see the module."""

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
    """Calls of Llama 4: a Python list, perhaps between markers; see the module."""

    name = "llama4_pythonic"
    trigger = "<|python_start|>"
    end = "<|python_end|>"
    markers = (trigger, end)


class Olmo3(Pythonic):
    """Calls of OLMo 3: one Python call per line, between markers; see the module."""

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
    """Return the grammar's rule for a call of one of these tools."""
    calls = (f'{quoted(f"{tool.name}(")} {schema(tool, _NOTATION)} ")"' for tool in tools)
    return f"form_call: {' | '.join(calls)}"


def _read_call(answer: Answer) -> Steps[None]:
    """Read a call. It counts as begun from its first argument on, because other text may look the same until then."""
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
