"""Python literals, as models write the arguments of calls in Python's syntax: read as JSON, and written from it.

The same words are understood in JSON's spelling: `true` beside `True`, `null` beside `None`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.core.json_grammar.parameters import PYTHON_WORDS
from paceline.services.gateway.planning.answers.expressions import escaped
from paceline.services.gateway.planning.answers.reader import FormError, Reader, Sink, Steps

KEY = re.compile(r"[\w.$@/-]*")
"""The name of an argument without quotes. It may be no identifier of Python, because tools have such names."""

_WORDS = {**PYTHON_WORDS, **{word: word for word in PYTHON_WORDS.values()}}
_WORD = re.compile(r"""[^\s,()\[\]{}:="']*""")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Number of hexadecimal digits after an escape."""


def pass_literal(reader: Reader, sink: Sink) -> Steps[None]:
    """Pass one literal to a sink as JSON text, as it comes. Tuples are lists, and unknown words are strings.

    Raises:
        FormError: the text is no literal.
        EndOfAnswerError: the answer ends within the literal. What came of it has been passed.
    """
    expected: list[str] = []
    """The closing brackets of all open ones."""
    before = ""
    """The JSON text between the value before and the next one. It is written once the next one is there."""
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
    """Pass a string to a sink as JSON text, as it comes. See `pass_literal`."""

    quote = yield from reader.take()
    sink('"')
    while (yield from reader.pass_to_end((quote, "\\"), lambda text: sink(escaped(text)))) != quote:
        yield from _pass_escape(reader, sink)
    sink('"')


def write_literal(value: Any) -> str:
    """Return a value from JSON as a literal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_literal(name)}: {write_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def write_key(name: str) -> str:
    """Return the name of an argument, in quotes if it must have them."""
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
    """Return the JSON text of a word. Numbers stay as they are, unless only Python has their spelling."""
    if word in _WORDS:
        return _WORDS[word]
    number = re.sub(r"^\+|_", "", word)
    number = re.sub(r"\.(?![0-9])", ".0", re.sub(r"^(-?)\.", r"\g<1>0.", number))
    return number if _JSON_NUMBER.fullmatch(number) else json.dumps(word, ensure_ascii=False)


def _pass_escape(reader: Reader, sink: Sink) -> Steps[None]:
    """Pass an escape after its backslash."""
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
