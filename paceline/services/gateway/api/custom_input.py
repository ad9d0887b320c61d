"""Reads the input of custom tools from the answers of models, which call them like functions with one argument."""

from __future__ import annotations

import json
import re

_JSON_STRING = json.JSONDecoder(strict=False)


class CustomInput:
    """Reads the input of a custom tool from the arguments {"input": "…"} while they come."""

    _BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _TEXT = re.compile(r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
    _HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")
    """Matches, at the end of a piece, the escape of the first half of a character whose second half follows."""

    def __init__(self) -> None:
        self._rest = ""
        self._has_begun = False
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Take the next piece of the arguments. Return new text of the input."""
        self._rest += arguments
        if not self._has_begun:
            begin = self._BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._has_begun, self._rest = True, self._rest[begin.end() :]
        if self._has_ended:
            return ""
        found = self._TEXT.match(self._rest)
        assert found is not None
        end = found.end()
        self._has_ended = self._rest.startswith('"', end)
        if not self._has_ended and (half := self._HALF.search(self._rest, 0, end)):
            end = half.start(1)
        text, self._rest = self._rest[:end], self._rest[end:]
        return _decoded(text)

    def finish(self) -> str:
        """End the input. Return the text that was held back; all arguments if they do not begin such an object."""
        may_begin = '{"input":"'.startswith("".join(self._rest.split()))
        return "" if self._has_begun or may_begin else self._rest


def _decoded(text: str) -> str:
    """Return the text of a JSON string without its quotes. Halves of characters without the other half are replaced."""
    decoded = str(_JSON_STRING.decode(f'"{text}"'))
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in text else decoded
