"""The grammar library's error messages, rewritten for the user who wrote the constraint."""

from __future__ import annotations

import re

NO_TOKEN = "no token is possible"
"""Paceline's own error message for a mask that allows no token."""

TOO_SLOW = (
    "to find the tokens that may come next takes too long; make it simpler: fewer optional properties, or rules with "
    "one way to read a text, such as a: a b | b in place of a: a a | b"
)
"""Paceline's own error message for a mask that takes too long to compute; `engine.constraint` has the limit."""

MAX_DEPTH = 120
"""Largest number of levels of objects and lists in a schema. The library's parser of JSON stops at 128."""

TOO_DEEP = f"it is nested too deeply; objects and lists can be at most {MAX_DEPTH} levels deep"

_LISTING = re.compile(r"\n *\d+ \| .*", re.DOTALL)
"""The source lines around a mistake. They are cut off, because some lines come from Paceline's translation and not from
the user.
"""
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_WRAPPING = re.compile(r'invalid regex ".*" \(in regex\): |lexer error: ', re.DOTALL)

_DEAD_END = rf"NoExtension|{NO_TOKEN}"

_WORDS = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        # JSON schemas.
        (
            r"(?:recursion limit|maximum recursion depth) exceeded",
            TOO_DEEP,
        ),
        # Regular expressions.
        (r"regex parse error:.*\nerror: (.*)", r"a regular expression cannot be read: \1; it is read in Rust's syntax"),
        (
            r"lookarounds not supported.*/(.*)/",
            r"the regular expression \1 has ^, $ or \\b inside; leave it out: the whole text has to match anyway",
        ),
        # Grammars.
        (r"no start rule found", 'the grammar has no rule named "start"; add one, as in start: "yes" | "no"'),
        (r"Failed to convert the grammar from GBNF to Lark: (.*)", r"it is not valid GBNF: \1"),
        (r'unknown name: "(.*?)"', r'it uses "\1", which no rule defines; add one of that name'),
        (r'unknown special token: (".*?")', r"this model has no special token \1; write text in quotes instead"),
        (r"Token range end too large: (\d+)", r"token \1 is out of this model's vocabulary"),
        # While tokens are generated.
        (r"panic: ", "the library of grammars fails at it; make it simpler, with fewer grammars within grammars"),
        (
            _DEAD_END,
            "nothing may follow here, and the answer may not end either; change it so that every beginning can end",
        ),
        (
            r"too many (?:expressions|states)|Too many items|fuel exhausted|maximum relevance check fuel"
            r"|(?:initial lexer configuration|grammar size) .* too big|lexer precomputation failed|LexerTooComplex",
            "it is too large to be enforced; make it smaller, especially counted repetitions such as {1000}",
        ),
    )
)


def cannot_go_on(message: str) -> bool:
    """Return whether the library's message says that no token may come next, and not that a limit was exceeded."""
    return re.search(_DEAD_END, message) is not None


def explain(message: str, with_place: bool = True) -> str:
    """Return a sentence that says what is wrong and what to do. An unknown message is returned without its listing.

    Args:
        with_place: keep the line and column. They are useful only if the library read the client's own text.
    """
    message = _LISTING.sub("", message.removesuffix("<non-verbose/>")).strip()
    place = _PLACE.match(message)
    message = message[place.end() :] if place else message
    if wrapping := _WRAPPING.match(message):
        message = message[wrapping.end() :]
    for pattern, words in _WORDS:
        if match := pattern.match(message):
            message = match.expand(words)
            break
    return f"line {place[1]}, column {place[2]}: {message}" if place and with_place else message
