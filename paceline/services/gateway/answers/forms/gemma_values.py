"""Values in the notation of Gemma's calls: how they are written, and their grammar by JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.services.gateway.answers.expressions import Spelling, Tool, regex
from paceline.services.gateway.answers.schemas import Rules, resolve
from paceline.services.gateway.answers.values import ValueGrammar

_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def written(value: object, quote: str) -> str:
    """Return a value in the notation.

    Args:
        quote: the marker before and after a text.
    """
    match value:
        case str():
            if quote not in value:
                return f"{quote}{value}{quote}"
            # A text with the marker in it is written as in JSON, in which the marker can be spelled differently.
            return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
        case list():
            return f"[{','.join(written(item, quote) for item in value)}]"
        case dict():
            members = (f"{written_key(key, quote)}:{written(each, quote)}" for key, each in value.items())
            return f"{{{','.join(members)}}}"
    return json.dumps(value)


def written_key(key: str, quote: str) -> str:
    """Return a key in the notation: bare if it is a name."""
    return key if _BARE_KEY.fullmatch(key) else written(key, quote)


class GemmaValues(ValueGrammar):
    """Expressions for values in the notation.

    Args:
        quote: the marker before and after a text.
    """

    any_key = '/[A-Za-z_][A-Za-z0-9_.-]{0,63}/ ":"'

    def __init__(self, spelling: Spelling, quote: str) -> None:
        super().__init__(Rules(spelling))
        self._literal = spelling.literal
        self._quote = quote

    def arguments(self, tool: Tool) -> str:
        """Return an expression for a tool's arguments."""
        self.root = tool.parameters
        return self.object(resolve(tool.parameters, self.root))

    def literal(self, value: object) -> str:
        text = written(value, self._quote)
        if not text.startswith(self._quote):
            return self._literal(text)
        # The same kinds of terminals as in `string`, because otherwise one would hide the other where both may come.
        rest = text.removeprefix(self._quote)
        if not self.rules.spelling.is_token(self._quote):
            return f"{self._literal(self._quote)} {self.rules.add(f'/{regex(rest)}/', '[lazy]')}"
        return f"{self._literal(self._quote)} {self._literal(rest)}"

    def key(self, name: str) -> str:
        return self._literal(written_key(name, self._quote) + ":")

    def string(self, schema: Mapping[str, Any]) -> str:
        return f"{self._literal(self._quote)} {self.rules.text(schema, self._quote)}"
