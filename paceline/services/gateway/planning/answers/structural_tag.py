"""Structural tags: text with parts in a given form, as clients of vLLM and XGrammar write them in `response_format`.

Tags become a grammar in llguidance's form of Lark. Text without a form of its own, such as text between triggered tags,
ends at the text that must follow, or with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from paceline.core.errors import ConstraintError
from paceline.core.grammar import MAX_TEXT_BYTES, OPTIONS, check_grammar, check_options, expression_of
from paceline.core.json_grammar.strings import quoted
from paceline.core.types import ConstraintKind
from paceline.services.gateway.planning.answers.expressions import ANY_TEXT, Spelling, regex, without
from paceline.services.gateway.planning.request_body import FailFast


class _Form(FailFast):
    # Unknown fields are refused, because they could change the answer.
    model_config = ConfigDict(strict=True, extra="forbid")


class ConstString(_Form):
    """A form that is exactly the text `value`."""

    type: Literal["const_string"]
    value: str


class JsonSchema(_Form):
    """A form that is JSON and fits a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class AnyText(_Form):
    """A form that is any text, up to the text that must follow."""

    type: Literal["any_text"]
    excludes: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that must not be in the text."""


class TagPattern(_Form):
    """A form that is text matching a regular expression."""

    type: Literal["regex"]
    pattern: str


class TagGrammar(_Form):
    """A form that is text following a grammar, in GBNF or Lark."""

    type: Literal["grammar"]
    grammar: str


class Sequenced(_Form):
    """A form of several elements, one after the other."""

    type: Literal["sequence"]
    elements: list[Form] = Field(min_length=1)


class OneOf(_Form):
    """A form that is any one of its elements."""

    type: Literal["or"]
    elements: list[Form] = Field(min_length=1)


class OptionalForm(_Form):
    """A form that is its content or the empty text."""

    type: Literal["optional"]
    content: Form


class Repeated(_Form):
    """A form that repeats its content: any number of times for `star`, at least once for `plus`."""

    type: Literal["star", "plus"]
    content: Form


class Tag(_Form):
    """A form that has a beginning, the content and an end."""

    type: Literal["tag"] = "tag"
    begin: str
    content: Form
    end: str | Annotated[list[str], Field(min_length=1)]
    """The end, or several texts any of which ends the tag."""


class TriggeredTags(_Form):
    """A form that is any text, in which each trigger must begin one of the tags."""

    type: Literal["triggered_tags"]
    triggers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    tags: list[Tag] = Field(min_length=1)
    """Tags that may occur. The beginning of each tag starts with a trigger."""
    at_least_one: bool = False
    """Whether the text must start with a tag."""
    stop_after_first: bool = False
    excludes: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that must not be between the tags."""


class SeparatedTags(_Form):
    """A form that is tags with a separator between them, without other text."""

    type: Literal["tags_with_separator"]
    tags: list[Tag] = Field(min_length=1)
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Form = Annotated[
    ConstString
    | JsonSchema
    | AnyText
    | TagPattern
    | TagGrammar
    | Sequenced
    | OneOf
    | OptionalForm
    | Repeated
    | Tag
    | TriggeredTags
    | SeparatedTags,
    Field(discriminator="type"),
]
"""The form of an answer or of a part of an answer."""

for _model in (Sequenced, OneOf, OptionalForm, Repeated, Tag, TriggeredTags, SeparatedTags):
    _model.model_rebuild()


def grammar_of_tag(form: Form, spelling: Spelling, options: dict[str, Any]) -> str:
    """Return the grammar, in llguidance's form of Lark, of an answer that has this form.

    Args:
        options: options for the grammars of schemas.

    Raises:
        ConstraintError: the form cannot be enforced.
    """
    writer = _Writer(spelling, options)
    start = writer.write(form, ())
    return "\n".join([f"start: {start}", *writer.rules, ""])


_MOST_WRITTEN = 8 * MAX_TEXT_BYTES
"""Largest number of characters of all expressions of a grammar together. Tags in tags may be written several times, so
a small request could need a huge grammar."""


class _Writer:
    """Writes the rules of a grammar.

    A method that writes a form returns an expression for the form and for the text after the form. Its argument `ends`
    lists the texts that may follow. The list is empty at the end of an answer.
    """

    def __init__(self, spelling: Spelling, options: dict[str, Any]) -> None:
        self.rules: list[str] = []
        self._spelling = spelling
        self._options = options
        self._room = _MOST_WRITTEN
        self._valid: set[tuple[ConstraintKind, str]] = set()

    def write(self, form: Form, ends: Sequence[str]) -> str:
        match form:
            case AnyText(excludes=excludes):
                return self._text(excludes, ends)
            case Tag(begin=begin, content=content, end=end):
                own = [end] if isinstance(end, str) else end
                inside = self.write(content, [text for text in own if text] if all(own) else ())
                return self._joined(self._literal(begin), inside, self._one_of(ends))
            case Sequenced(elements=elements):
                *before, last = elements
                if any(map(_is_open, before)):
                    raise ConstraintError("in a sequence, text without an end can only be the last element")
                return self._joined(*(self.write(element, ()) for element in before), self.write(last, ends))
            case OneOf(elements=elements):
                return self._rule(" | ".join(self.write(element, ends) for element in elements))
            case OptionalForm(content=content):
                return self._rule(f"{self.write(content, ends)} | {self._one_of(ends) or EMPTY}")
            case TriggeredTags():
                return self._triggered(form, ends)
            case SeparatedTags():
                return self._joined(self._separated(form), self._one_of(ends))
            case Repeated(type=kind, content=content):
                if _is_open(content):
                    raise ConstraintError(f"the content of {kind} must not be text without an end")
                return self._joined(f"({self.write(content, ())}){'+' if kind == 'plus' else '*'}", self._one_of(ends))
            case _:
                return self._joined(self._leaf(form), self._one_of(ends))

    def _leaf(self, form: Form) -> str:
        match form:
            case ConstString(value=value):
                return self._literal(value)
            case JsonSchema(json_schema=schema):
                if schema is False:
                    raise ConstraintError("the schema false allows nothing")
                own = {} if schema is True else schema
                check_options(own)
                return self._checked(ConstraintKind.JSON_SCHEMA, json.dumps({**own, OPTIONS: self._options}))
            case TagPattern(pattern=pattern):
                return self._checked(ConstraintKind.REGEX, pattern)
            case TagGrammar(grammar=grammar):
                return self._checked(ConstraintKind.GRAMMAR, grammar)
        raise AssertionError(form)

    def _triggered(self, form: TriggeredTags, ends: Sequence[str]) -> str:
        calls = [self._call(trigger, form) for trigger in form.triggers]
        if homeless := [tag for tag in form.tags if not any(tag.begin.startswith(each) for each in form.triggers)]:
            raise ConstraintError(f"no trigger is the beginning of the tag {homeless[0].begin[:80]!r}")
        call = self._rule(" | ".join(call for call in calls if call))
        plain = [trigger for trigger in form.triggers if not self._starts_with_token(trigger)]
        tail = self._text([*form.excludes, *plain], ends)
        first = self._rule(" | ".join(self.write(tag, ()) for tag in form.tags)) if form.at_least_one else ""
        if form.stop_after_first:
            after = self._one_of(ends)
            return self._joined(first, after) if first else self._rule(f"{call} {after} | {tail}")
        return self._joined(first, f"{call}*", tail)

    def _call(self, trigger: str, form: TriggeredTags) -> str:
        """Return an expression for text, a trigger, and the rest of a tag; "" if no tag starts with the trigger."""
        own = [tag for tag in form.tags if tag.begin.startswith(trigger)]
        rests = [self.write(tag.model_copy(update={"begin": tag.begin[len(trigger) :]}), ()) for tag in own]
        return f"{self._text(form.excludes, [trigger])} {self._rule(' | '.join(rests))}" if own else ""

    def _separated(self, form: SeparatedTags) -> str:
        tag = self._rule(" | ".join(self.write(tag, ()) for tag in form.tags))
        again = "" if form.stop_after_first else f" ({self._joined(self._literal(form.separator), tag)})*"
        return f"{tag}{again}" if form.at_least_one else f"({tag}{again})?"

    def _text(self, excludes: Sequence[str], ends: Sequence[str]) -> str:
        """Return an expression for any text and the end after the text."""
        terminal = without(*excludes)
        if not ends:
            return self._terminal(terminal)
        if all(map(self._starts_with_token, ends)):
            return f"{self._terminal(terminal)} {self._one_of(ends)}"
        if any(map(self._has_token, ends)):
            raise ConstraintError("an end or a trigger that holds a token of the model's own must begin with it")
        found = f"/{ANY_TEXT}({'|'.join(map(regex, ends))})/"
        return self._rule(self._terminal(found + terminal.removeprefix(f"/{ANY_TEXT}/")), "[lazy]")

    def _checked(self, kind: ConstraintKind, text: str) -> str:
        if (kind, text) not in self._valid:  # a check takes a millisecond, and tags in tags are written several times
            check_grammar(kind, text)
            self._valid.add((kind, text))
        return self._rule(expression_of(kind, text))

    def _one_of(self, texts: Sequence[str]) -> str:
        return self._counted(f"({' | '.join(map(self._literal, texts))})") if texts else ""

    def _literal(self, text: str) -> str:
        return self._spelling.literal(text) if text else ""

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"part{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {self._counted(expression) or EMPTY}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"TEXT{len(self.rules)}"
        self.rules.append(f"{name}: {self._counted(expression)}")
        return name

    def _counted(self, expression: str) -> str:
        """Return an expression unchanged. Raises ConstraintError if all expressions together are too long."""
        self._room -= len(expression)
        if self._room < 0:
            raise ConstraintError(f"the tags need a grammar of more than {MAX_TEXT_BYTES >> 10} KiB; send fewer")
        return expression

    def _starts_with_token(self, text: str) -> bool:
        return self._spelling.literal(text).startswith("<[")

    def _has_token(self, text: str) -> bool:
        return self._spelling.literal(text) != quoted(text)

    @staticmethod
    def _joined(*expressions: str) -> str:
        return " ".join(filter(None, expressions)) or EMPTY


EMPTY = '""'


def _is_open(form: Form) -> bool:
    """Return whether a form has no end of its own, so that only the text after it shows where it ends."""
    match form:
        case AnyText() | TriggeredTags():
            return True
        case Tag(content=content, end=end):
            return not all([end] if isinstance(end, str) else end) and _is_open(content)
        case Sequenced(elements=elements):
            return _is_open(elements[-1])
        case OneOf(elements=elements):
            return any(map(_is_open, elements))
        case OptionalForm(content=content) | Repeated(content=content):
            return _is_open(content)
    return False
