"""Expressions of grammars, in llguidance's form of Lark, from which tool calls are built."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.grammar import OPTIONS
from paceline.core.json_grammar.strings import quoted

ANY_TEXT = r"(.|\n)*"
"""A regular expression for any text without special tokens."""

Notation = Mapping[str, Any]
"""Options of a schema that name the notation of its grammar; see `core/json_grammar/notations.py`."""

JSON: Notation = {}

SPACE = r"[ \n\r\t]{0,8}"
"""A regular expression for white space between the parts of a call."""


@dataclass(frozen=True, slots=True)
class ToolSpelling:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the function's arguments, which are an object."""


class Spelling:
    """The spelling of texts in a grammar: added tokens are written as ids, and all other text as strings.

    Args:
        own_tokens: ids, by text, of the added tokens that the grammar library does not match as text.
    """

    def __init__(self, own_tokens: Mapping[str, int]) -> None:
        self._ids = own_tokens
        # The longest first, because one may begin with another.
        names = sorted(own_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def is_token(self, text: str) -> bool:
        """Return whether a text is the text of one added token."""
        return text in self._ids

    def tokens(self, text: str) -> frozenset[int]:
        """Return the ids of the added tokens within a text."""
        pieces = () if self._split is None else self._split.findall(text)
        return frozenset(self._ids[piece] for piece in pieces)

    def literal(self, text: str) -> str:
        """Return the grammar's expression that matches exactly this text."""
        pieces = [text] if self._split is None else self._split.split(text)
        spelled = [f"<[{self._ids[p]}]>" if p in self._ids else quoted(p) for p in pieces if p]
        return " ".join(spelled) or '""'


def regex(text: str) -> str:
    """Return a regular expression of a grammar that matches exactly this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", r"\n")


def without(*texts: str, pattern: str = ANY_TEXT) -> str:
    """Return the terminal that matches each text which fits `pattern` and contains none of `texts`."""
    return f"/{pattern}/" + "".join(f" & ~/{ANY_TEXT}{regex(text)}{ANY_TEXT}/" for text in texts)


def json_call(tool: ToolSpelling, name: str, arguments: str) -> str:
    """Return an expression for a call that is a JSON object with a member for the name and one for the arguments.

    Args:
        name: name of the member with the tool's name.
        arguments: name of the member with the arguments.
    """
    return json_object((name, json_text(tool.name)), (arguments, schema(tool)))


def json_object(*members: tuple[str, str]) -> str:
    """Return an expression for a JSON object with these members, each a name and an expression for its value."""
    pieces = [piece for name, value in members for piece in (json_text(name), '":"', value, '","')]
    return "(" + " SPACE ".join(['"{"', *pieces[:-1], '"}"']) + ")"


def json_list(calls: str, parallel: bool) -> str:
    """Return an expression for a JSON list of calls, with the rule for one call in the next line.

    Args:
        calls: an expression for one call.
        parallel: whether the list may have more than one call.
    """
    more = '(SPACE "," SPACE form_call)*' if parallel else ""
    return f'"[" SPACE form_call {more} SPACE "]"\nform_call: {calls}'


def schema(tool: ToolSpelling, notation: Notation = JSON) -> str:
    """Return an expression for a tool's arguments.

    Args:
        notation: how the model writes values; JSON by default.
    """
    options = {**tool.parameters.get(OPTIONS, {}), **notation}
    parameters = {**tool.parameters, OPTIONS: options} if options else dict(tool.parameters)
    return f"%json {json.dumps(parameters, ensure_ascii=False)}"


def escaped(text: str) -> str:
    """Return a text with JSON's escapes, as a string contains it between its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_text(text: str) -> str:
    """Return the grammar's expression for a text as a JSON string with its quotes, without needless escapes."""
    return quoted(json.dumps(text, ensure_ascii=False))
