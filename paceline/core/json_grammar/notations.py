"""The notations in which values are written: JSON, and the notations in which models write arguments of calls.

The options of a schema name the notation of its grammar (`notation_of`). The forms in
`services/gateway/planning/answers/forms` read what these grammars allow.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from paceline.core.errors import ConstraintError
from paceline.core.json_grammar.parameters import is_text
from paceline.core.json_grammar.strings import IN_JSON, IN_SINGLE_QUOTES, PLAIN, Quoting

_SPACE = r"[ \n\r\t]{0,32}"


@dataclass(frozen=True, slots=True, eq=False)
class Notation:
    """A notation of values. Its marks and words are expressions of terminals."""

    quotings: tuple[Quoting, ...] = (IN_JSON,)
    """Ways to write a text."""
    names: tuple[Quoting, ...] = (IN_JSON,)
    """Ways to write the name of a member. A given name is written in the first of these ways that can write it."""
    fallback: Quoting | None = IN_JSON
    """Way to write a given text or name that none of the other ways can write; None if there is no such way."""
    any_value: str = ""
    """An expression that matches every value, if each value is read from its text; otherwise ""."""
    words: Mapping[object, str] = field(default_factory=lambda: {True: '"true"', False: '"false"', None: '"null"'})
    opening: str = '"{"'
    closing: str = '"}"'
    opening_list: str = '"["'
    closing_list: str = '"]"'
    comma: str = '","'
    colon: str = '":"'
    end: str = ""
    """A regular expression for the text that must follow each value."""
    types: frozenset[str] = frozenset()
    """Types that a value may have if its text does not show its type; empty if any type is possible."""
    inside: Notation | None = None
    """The notation of values inside arrays and objects; None if they have the same notation."""
    of_member: Callable[[frozenset[str]], Notation] | None = None
    """Function of a notation of arguments: takes the types of an argument and returns the argument's notation."""


def _free_of(mark: str) -> str:
    """Return a regular expression for texts without a mark whose first character it has only once.

    A complement would be simpler, but combined with a limit of length it makes the library slow.
    """
    first, *rest = (rf"\x{{{ord(character):X}}}" for character in mark)
    steps = [f"([^{first}{character}][^{first}]*" for character in rest]
    # After each character but the last, the next one of the mark may follow.
    after = "".join(f"{step}|{character}" for step, character in zip(steps, rest[:-1])) + "".join(steps[-1:])
    return f"[^{first}]*({first}{after}{')?' * len(rest)})*"


JSON_VALUES = Notation()


def _spaced(notation: Notation) -> Notation:
    """Return a notation that allows white space around its marks.

    No white space is allowed after an array or object, because the lexer would take it from the text that must follow.
    """
    return replace(
        notation,
        opening=rf"/\{{{_SPACE}/",
        closing=rf"/{_SPACE}\}}/",
        opening_list=rf"/\[{_SPACE}/",
        closing_list=rf"/{_SPACE}\]/",
        comma=f"/{_SPACE},{_SPACE}/",
        colon=f"/{_SPACE}:{_SPACE}/",
    )


_SPACED_JSON = _spaced(JSON_VALUES)


# Python's calls: name="value", other=["value", None]. Their forms also understand JSON's words.

_PYTHON_NAME = re.compile(r"[\w.$@/-]+")
_PYTHON = _spaced(
    Notation(
        quotings=(
            replace(IN_JSON, loose=r"""/"([^"\\\n]|\\(.|\n))*"/"""),
            Quoting(IN_SINGLE_QUOTES, "'", "'", loose=r"/'([^'\\\n]|\\(.|\n))*'/"),
        ),
        words={True: "/True|true/", False: "/False|false/", None: "/None|null/"},
    )
)
_PYTHON_ARGUMENTS = replace(
    _PYTHON,
    names=(
        Quoting(
            PLAIN,
            shapes=(r"[A-Za-z_][A-Za-z0-9_.$@\/-]{0,63}",),
            can_write=lambda name: _PYTHON_NAME.fullmatch(name) is not None,
        ),
        IN_JSON,
    ),
    opening='""',
    closing='""',
    colon='"="',
    of_member=lambda types: _PYTHON,
)


# Gemma's calls: {name:<|"|>value<|"|>,other:[1,null]}

_GEMMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@functools.lru_cache(maxsize=16)
def _gemma(quote: str, token: str) -> Notation:
    """Return the notation of Gemma's calls, whose texts are between markers.

    Args:
        quote: the marker.
        token: the marker as an element of a grammar if it is one token, else "".
    """
    mark = re.sub(r"([|/])", r"\\\1", quote)
    quoting = Quoting(
        PLAIN,
        mark="" if token else mark,
        token=token,
        shapes=(_free_of(quote),),
        can_write=lambda value: quote not in value,
    )
    name = Quoting(
        PLAIN,
        shapes=("[A-Za-z_][A-Za-z0-9_.-]{0,63}",),
        can_write=lambda name: _GEMMA_NAME.fullmatch(name) is not None,
    )
    return Notation(quotings=(quoting,), names=(name, quoting))


# Qwen3-Coder's calls: each argument is a tag with a text, or with JSON if its types say so.

_PARAMETER_TAG = "</parameter>"
_PARAMETER_END = r"\n<\/parameter>\n"
_ANY_PARAMETER = Quoting(
    PLAIN, unlike=(r"(.|\n)*(\n<\/parameter>|<\/parameter>\s*(<parameter=|<\/function>|<\/tool_call>))(.|\n)*",)
).text()
"""A text without limits may contain the tag as long as it does not look like the end of the value."""
_READ_AS_JSON = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
"""For each type, an expression for the texts that are read as JSON of this type."""
_OPENING = {"array": r"\[", "object": r"\{"}
"""For each type, an expression for the beginning of texts that may be read as JSON of this type."""


@functools.lru_cache(maxsize=64)
def _parameter(types: frozenset[str]) -> Notation:
    """Return the notation of an argument that is read as one of these types; any if there are none."""
    words = [_READ_AS_JSON[each] for each in sorted(types & _READ_AS_JSON.keys())]
    openings = "".join(_OPENING[each] for each in sorted(types & _OPENING.keys()))
    quoting = Quoting(
        PLAIN,
        shapes=(
            _free_of(_PARAMETER_TAG),
            *([rf"[ \n\r\t]*([^ \n\r\t{openings}](.|\n)*)?"] if openings else []),
        ),
        unlike=(rf"[ \n\r\t]*({'|'.join(words)})[ \n\r\t]*",) if words else (),
        loose="" if words or openings else _ANY_PARAMETER,
        can_write=lambda text: _PARAMETER_TAG not in text and is_text(text, types),
    )
    return Notation(
        quotings=(quoting,),
        fallback=None,
        any_value=_ANY_PARAMETER,
        end=_PARAMETER_END,
        types=types,
        inside=_SPACED_JSON,
    )


_PARAMETERS = Notation(
    names=(
        Quoting(
            PLAIN,
            "<parameter=",
            r">\n",
            shapes=(r"[^<>\n]{1,64}",),
            can_write=lambda name: bool(name) and not set(name) & set("<>\n"),
        ),
    ),
    fallback=None,
    opening='""',
    closing='""',
    comma='""',
    colon='""',
    of_member=_parameter,
)

_TOKEN = re.compile(r"<\[[0-9]+\]>|")
_MARK = re.compile(r"(?s:.{2,16})")
"""The form of a mark before and after texts. Clients may choose the mark, and the library takes long for a long mark.
"""


def notation_of(given: object) -> Notation:
    """Return the notation that a schema's options name.

    Args:
        given: a list of the notation's name and its arguments; None for JSON.

    Raises:
        ConstraintError: there is no such notation.
    """
    match given:
        case None:
            return JSON_VALUES
        case ["python"]:
            return _PYTHON_ARGUMENTS
        case ["parameters"]:
            return _PARAMETERS
        case ["gemma", str(quote), str(token)] if _MARK.fullmatch(quote) and _TOKEN.fullmatch(token):
            return _gemma(quote, token)
    raise ConstraintError("there is no such notation")
