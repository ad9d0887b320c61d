"""Translation of constraints into grammars of the library llguidance, with limits on the time of checks and masks.

A gateway accepts a constraint with the same code with which workers compile it. The library needs no tokenizer to check
a grammar, compiles one within milliseconds, and computes a mask within about ten microseconds. `%json SCHEMA` in a
grammar stands for the grammar of `json_grammar`.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from paceline.core.errors import ConstraintError
from paceline.core.grammar_errors import explain
from paceline.core.json_grammar.compiler import Compiled, SchemaOptions, compile_schema
from paceline.core.json_grammar.conjunctions import Unenforced
from paceline.core.json_grammar.notations import notation_of
from paceline.core.json_grammar.strings import quoted
from paceline.core.types import ConstraintKind

MAX_TEXT_BYTES = 128 << 10
"""Largest size of a constraint's text in bytes. The slowest schema of this size, with 4,000 properties, compiles in 2
s.
"""

LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,
    max_items_in_row=20_000,
    step_max_items=20_000,
    verbose_errors=False,
)
"""Limits on the library's work. The fuel limits end work that would take longer than some tenths of a second.

`max_lexer_states` states of one lexer take about 13 MB; typical constraints need a few hundred. `max_items_in_row` is
enough for a choice of thousands of texts, or for as many properties. `step_max_items` is enough for two thousand
optional properties; with it, a mask ends after some tenths of a second at the latest.
"""

_MAX_RULES = 1_500
"""Largest number of rules of a client's grammar. The library compiles nested rules recursively, and its stack is
limited."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""An option against an endless loop. By default the library follows a grammar while only one token is possible. In
`start: /a+/ /a+/` this never ends, because the first part takes every "a" that the second one needs. Constraints of
other kinds cannot cause it."""

OPTIONS = "x-guidance"
"""Name of the keyword at the root of a schema that holds options from the gateway, which `_options` reads."""

_LONGEST_INTEGER = 400

_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits))
"""A decoder that accepts integers of thousands of digits, as JSON does. Python's own decoder refuses such integers."""

_SCHEMA = re.compile(
    r"""
    (?P<other> "(?:\\.|[^"\\\n])*" | /(?!/)(?:\\.|[^/\\])*/ | (?://|\#)[^\n]* )
    | (?P<json> %json\b \s* ) | (?P<colon> : ) | (?P<lark> %lark\b ) | (?P<ignore> %ignore\b )
""",
    re.VERBOSE | re.DOTALL,
)
"""A text, a regular expression or a comment in a grammar, a word for a grammar within it (%json, %lark) or for text
that may stand anywhere (%ignore), or a colon, which every rule has."""

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
"""The beginning of a rule in GBNF. Lark has a single colon there, and may have this sign within texts."""

_MESSAGE_CHARACTERS = 500


def grammar_of(kind: ConstraintKind, text: str) -> str:
    """Return a constraint as a grammar of the library. Raises ConstraintError if the text is not of this kind."""
    try:
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise ConstraintError(f"it is longer than {MAX_TEXT_BYTES >> 10} KiB; shorten it")
        if kind is ConstraintKind.JSON_SCHEMA:
            return _compiled(text).grammar
        if kind is ConstraintKind.GRAMMAR:
            grammar = _in_lark(text)
            _check_parts(Counter(match.lastgroup for match, _ in _parts(grammar)))
            return _with_schemas(grammar) + _NO_FORCING
        if kind is ConstraintKind.ANSWER:
            return _with_schemas(text) + _NO_FORCING
        if kind is ConstraintKind.REGEX:
            # \d and \w mean ASCII, as in a schema's `pattern`. Users rarely mean digits and letters of all scripts, and
            # Python and the library have different lists of them.
            return f"start: /{regex_to_lark(text, use_ascii='dw')}/"
        return grammar_from(kind.value, text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(explain(str(error))[:_MESSAGE_CHARACTERS]) from error


def _check_parts(parts: Counter[str | None]) -> None:
    """Raise ConstraintError if the library cannot work with the parts that `_SCHEMA` finds in a grammar."""
    if parts["colon"] > _MAX_RULES:
        raise ConstraintError(f"it has more than {_MAX_RULES} rules; use fewer")
    if parts["ignore"] and (parts["json"] or parts["lark"]):
        # Where a grammar within it may begin or be left out, the library fails at text that is ignored.
        raise ConstraintError(
            "%ignore does not work beside %json or %lark; write where the ignored text may stand, as in "
            r'start: "a" WS? %json {} with WS: /[ \n]+/'
        )


def expression_of(kind: ConstraintKind, text: str) -> str:
    """Return a constraint that has been checked as an expression within a Lark grammar."""
    if kind is ConstraintKind.JSON_SCHEMA:
        return f"%json {text}"
    if kind is ConstraintKind.REGEX:
        return f"/{regex_to_lark(text, use_ascii='dw')}/"
    if kind is ConstraintKind.CHOICE:
        return " | ".join(map(quoted, json.loads(text)))
    grammar = _in_lark(text) if kind is ConstraintKind.GRAMMAR else text
    return f"%lark {{\n{grammar}\n}}\n"


def _in_lark(grammar: str) -> str:
    """Return a client's grammar, which may be in GBNF, in Lark."""
    return grammar_from("gbnf", grammar) if _GBNF_RULE.search(grammar) else grammar


def check_options(schema: object) -> None:
    """Raise ConstraintError if a client's schema sets options that only the gateway may set."""
    if isinstance(schema, dict) and OPTIONS in schema:
        raise ConstraintError(f"{OPTIONS} is not supported; leave it out")


def unenforced(kind: ConstraintKind, text: str) -> tuple[Unenforced, ...]:
    """Return the keywords of JSON schemas that a checked constraint does not enforce."""
    if kind is ConstraintKind.JSON_SCHEMA:
        return _compiled(text).unenforced
    if kind not in (ConstraintKind.GRAMMAR, ConstraintKind.ANSWER) or "%json" not in text:
        return ()
    schemas = [schema for match, schema in _parts(text) if match["json"]]
    return tuple(each for schema in schemas for each in _compiled(schema).unenforced)


def _parts(grammar: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield the parts that `_SCHEMA` finds in a grammar, each with the text of the schema after it, if there is one."""
    at = 0
    while (match := _SCHEMA.search(grammar, at)) is not None:
        at = match.end()
        schema = ""
        if match["json"]:
            _, at = _DECODER.raw_decode(grammar, at)
            schema = grammar[match.end() : at]
        yield match, schema


def _with_schemas(grammar: str) -> str:
    """Return a grammar in Lark with the grammars of the schemas in it."""
    if "%json" not in grammar:
        return grammar
    pieces, at = [], 0
    for match, schema in _parts(grammar):
        if match["json"]:
            pieces += [grammar[at : match.start()], f"%lark {{\n{_compiled(schema).grammar}}} "]
            at = match.end() + len(schema)
    return "".join([*pieces, grammar[at:]])


@functools.lru_cache(maxsize=64)  # a grammar may have megabytes
def _compiled(text: str) -> Compiled:
    schema, end = _DECODER.raw_decode(text.lstrip())
    if rest := text.lstrip()[end:].strip():
        raise ConstraintError(f"Extra data after the schema: {rest[:20]}")
    if not isinstance(schema, dict | bool):
        raise ConstraintError("a schema must be a JSON object, or true")
    return compile_schema(schema, _options(schema))


def _options(schema: dict[str, Any] | bool) -> SchemaOptions:
    """Return the options of a schema, and remove them from it.

    Schemas in a client's grammar may have all options, because the client may send the grammar of a rendered chat.

    Raises ConstraintError if there are other options.
    """
    given = schema.pop(OPTIONS, {}) if isinstance(schema, dict) else {}
    options = SchemaOptions()
    known = {"whitespace_flexible", "whitespace_pattern", "closed", "tolerant", "notation"}
    white_space = given.get("whitespace_pattern", options.white_space) if isinstance(given, dict) else 0
    if not isinstance(white_space, str | None) or not given.keys() <= known:
        raise ConstraintError(f"{OPTIONS} is not supported; leave it out")
    return SchemaOptions(
        white_space=white_space if given.get("whitespace_flexible", True) else None,
        closes=given.get("closed", True),
        is_lenient=given.get("tolerant", False),
        notation=notation_of(given.get("notation")),
    )


def check_grammar(kind: ConstraintKind, text: str) -> None:
    """Raise ConstraintError if no output can follow a constraint, or if the library cannot enforce it."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(kind, text), limits=LIMITS)
    if wrong:
        message = explain(messages[0], with_place=kind is ConstraintKind.GRAMMAR)
        raise ConstraintError(message[:_MESSAGE_CHARACTERS])


def compile_grammar(grammar: str, tokenizer: LLTokenizer, kind: ConstraintKind) -> LLMatcher:
    """Return the matcher at the beginning of an output, which has computed the first mask.

    Args:
        grammar: the result of `grammar_of`.
        kind: the language in which the constraint was written.

    Raises:
        ConstraintError: the grammar cannot be enforced, or no output can follow it.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        message = explain(matcher.get_error(), with_place=kind is ConstraintKind.GRAMMAR)
        raise ConstraintError(message[:_MESSAGE_CHARACTERS])
    return matcher
