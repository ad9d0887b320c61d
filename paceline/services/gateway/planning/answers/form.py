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
    """The texts before and after a model's reasoning."""

    start: str
    end: str
    label: str = ""
    """Text after `start` that is not part of the reasoning, such as the name of a channel; "" if there is none."""
    always_open: bool = False
    """Whether each answer begins within reasoning, even if the prompt does not end with `start`."""

    @property
    def opening(self) -> str:
        """The whole text before the reasoning: `start` and `label`."""
        return self.start + self.label


class ToolForm:
    """A family's form of tool calls: its triggers, its parser and its grammar.

    Attributes:
        name: the name by which users choose the form.
        trigger: the text that begins a call; "" if an answer with calls always is nothing but calls, see `bare_start`.
        aliases: other texts with the same meaning as the trigger.
        markers: texts that are never content, the triggers included. They may be added tokens of the model.
        bare_start: beginning of an answer that is nothing but calls and has no trigger: a regular expression for each
            of its first terminals, with white space allowed between them; () if there are no such answers.
            `begins` must recognize the same answers.
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
        """Return a new id for a call, in a form that the family's chat templates accept."""
        return new_call_id()

    def begins(self, reader: Reader) -> Steps[bool]:
        """Return whether the answer begins with a call that has no trigger."""
        return False
        yield

    def argument_types(self, tools: Sequence[ToolSpelling]) -> Mapping[str, ArgumentTypes]:
        """Return the types of each tool's arguments, by the tool's name.

        By default every type is allowed, because in most forms the text of a value shows its type. Reading types from a
        schema may take a second, so this is called before the answer begins, and not on the event loop.
        """
        return {tool.name: ANY_TYPES for tool in tools}

    def read(self, answer: Answer) -> Steps[None]:
        """Read the calls after the trigger, or the calls that `begins` has found.

        Raises FormError if the text is no call, and EndOfAnswerError if the answer ends within a call.
        """
        raise NotImplementedError

    def write(self, name: str, arguments: str) -> str:
        """Return a call as the model writes it, the trigger included.

        Args:
            arguments: JSON text.
        """
        raise NotImplementedError

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return all calls of one answer as the model writes them.

        Args:
            calls: the name of each call and its arguments as JSON text.
        """
        return "\n".join(self.write(name, arguments) for name, arguments in calls)

    def notation(self, spelling: Spelling) -> Notation:
        """Return how the model writes the arguments of a call, as options for their schema; {} for JSON."""
        return JSON

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        """Return an expression of a grammar for the calls after the trigger, or for an answer without a trigger.

        The form's own rules may follow the expression, each in a line of its own.

        Args:
            tools: the tools that may be called.
            parallel: whether several calls may follow one trigger, if the form knows this.
        """
        raise NotImplementedError


class ChannelForm(ToolForm):
    """A form of whole answers: their reasoning, content and calls are messages, whose headers name a channel.

    `read` reads the whole answer, from its beginning or from the end of reasoning that the prompt has begun. The method
    raises no FormError. `grammar` is not used.

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
        """Return the rules of a grammar for an answer, or, if the answer begins with reasoning, for what follows this.

        The rule to start with is named "body".

        Args:
            may_think: whether reasoning may come again.
            content: name of the rule for the content; None to use the existing rule "TEXT", for any text.
        """
        raise NotImplementedError
