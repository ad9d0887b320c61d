"""The forms in which models mark their reasoning and write tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.json_grammar.parameters import ANY_TYPES, ArgumentTypes
from paceline.services.gateway.planning.answers.answer import Answer, new_call_id
from paceline.services.gateway.planning.answers.expressions import JSON, Notation, Spelling, ToolSpelling
from paceline.services.gateway.planning.answers.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks of a model's reasoning."""

    start: str
    end: str
    label: str = ""
    """Text after the start that is no part of the reasoning."""
    always_open: bool = False
    """Whether each answer begins within reasoning, although the prompt does not show it."""

    @property
    def opening(self) -> str:
        """All text before the reasoning."""
        return self.start + self.label


class ToolForm:
    """A family's form of tool calls: its triggers, its parser and its grammar.

    Attributes:
        name: the name by which users choose the form.
        trigger: the text that begins a call; "" if calls are always whole answers, see `bare_start`.
        aliases: other texts that begin a call as the trigger does.
        markers: texts that are never content, the triggers included. They may be tokens of the model's own.
        bare_start: if calls may be whole answers, without a trigger: how such an answer begins. A regular expression
            for each of its first terminals, between which there may be white space. `begins` finds the same texts.
        repeats: whether the trigger may come again after a call.
    """

    name: str
    trigger = ""
    aliases: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    bare_start: tuple[str, ...] = ()
    repeats = True

    @property
    def triggers(self) -> tuple[str, ...]:
        """All texts that begin a call."""
        return (self.trigger, *self.aliases) if self.trigger else ()

    def new_call_id(self) -> str:
        """Return an id for a call, as the family's chat templates accept it."""
        return new_call_id()

    def begins(self, reader: Reader) -> Steps[bool]:
        """Look at the beginning of an answer. Return whether it is a call, although no trigger has come."""
        return False
        yield

    def argument_types(self, tools: Sequence[ToolSpelling]) -> Mapping[str, ArgumentTypes]:
        """Return the types of each tool's arguments, by its name. Most forms need none: texts of values show them.

        To read them from a schema may take a second, so this is done before the answer, and not on the event loop.
        """
        return {tool.name: ANY_TYPES for tool in tools}

    def read(self, answer: Answer) -> Steps[None]:
        """Read the calls after the trigger, or the calls that `begins` has found.

        Raises FormError if what comes is no call, and EndOfAnswerError if the answer ends within one.
        """
        raise NotImplementedError

    def write(self, name: str, arguments: str) -> str:
        """Return a call as the model writes it, the trigger included.

        Args:
            arguments: JSON text.
        """
        raise NotImplementedError

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the calls of one answer, each a name and arguments, as the model writes them."""
        return "\n".join(self.write(name, arguments) for name, arguments in calls)

    def notation(self, spelling: Spelling) -> Notation:
        """Return the notation of a call's arguments."""
        return JSON

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        """Return an expression of a grammar for what comes after the trigger, or for the whole answer.

        The form's own rules may follow it, each in a line of its own.

        Args:
            tools: the tools that may be called.
            parallel: whether there may be several calls after one trigger, where the form has that.
        """
        raise NotImplementedError


class ChannelForm(ToolForm):
    """A form of whole answers: their reasoning, content and calls are messages, whose headers name a channel.

    So one computation reads all of an answer: `read` begins where the answer does, or after reasoning that the prompt
    has begun, and raises no FormError. `grammar` is not used.

    Attributes:
        thought: the beginning and the end of a message with reasoning.
        between: the text between the end of a message and the header of the next one.
    """

    thought: ReasoningMarks
    between: str

    def rules(
        self,
        spelling: Spelling,
        tools: Sequence[ToolSpelling],
        *,
        may_call: bool,
        must_call: bool,
        may_think: bool,
        content: str | None,
    ) -> list[str]:
        """Return the rules of a grammar for an answer, or for the rest of it after its first reasoning.

        One of them is named "body".

        Args:
            may_think: whether reasoning may come again.
            content: the name of the rule for the content; None if it may be any text, which is named "TEXT".
        """
        raise NotImplementedError
