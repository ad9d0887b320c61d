"""How a model marks its reasoning, and how it writes tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.services.gateway.answers.answer import Answer
from paceline.services.gateway.answers.expressions import Spelling, Tool
from paceline.services.gateway.answers.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class Thought:
    """How a model marks its reasoning."""

    start: str
    end: str
    always_open: bool = False
    """Whether each answer begins within reasoning, although the prompt does not show it."""


class ToolForm:
    """How a family of models writes tool calls: where they begin, how they are read, and their grammar.

    Attributes:
        name: the name by which users choose the form.
        trigger: the text that begins a call; "" if calls are whole answers, see `bare_start`.
        markers: texts that are never content, the trigger included. They may be tokens of the model's own.
        bare_start: if there is no trigger: a regular expression for the beginning of an answer that is a call.
        repeats: whether the trigger may come again after a call.
    """

    name: str
    trigger = ""
    markers: tuple[str, ...] = ()
    bare_start = ""
    repeats = True

    def begins(self, reader: Reader) -> Steps[bool]:
        """Look at the beginning of an answer. Return whether it is a call, although no trigger has come."""
        return False
        yield

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

    def grammar(self, spelling: Spelling, tools: Sequence[Tool], parallel: bool) -> str:
        """Return an expression of a grammar for what comes after the trigger, or for the whole answer.

        Args:
            tools: the tools that may be called.
            parallel: whether there may be several calls after one trigger, where the form has that.
        """
        raise NotImplementedError
