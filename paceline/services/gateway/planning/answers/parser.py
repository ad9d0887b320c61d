"""The parser of one answer: content, reasoning and tool calls from the model's text, as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from paceline.core.json_grammar.parameters import ArgumentTypes
from paceline.services.gateway.planning.answers.answer import Answer, Part, join_parts, new_call_id
from paceline.services.gateway.planning.answers.form import ChannelForm, ReasoningMarks, ToolForm
from paceline.services.gateway.planning.answers.reader import EndOfAnswerError, FormError, Reader, Steps

_NO_TOOLS: Mapping[str, ArgumentTypes] = {}


def read_answer(
    answer: Answer,
    thought: ReasoningMarks | None,
    form: ToolForm | None,
    is_open: bool,
    tools: Mapping[str, ArgumentTypes] = _NO_TOOLS,
) -> Steps[None]:
    """Read a whole answer: reasoning, content and tool calls, which become parts of `answer`.

    Args:
        is_open: whether the answer begins within reasoning.
        tools: the tools that may be called; see `ToolForm.argument_types`.
    """
    reader = answer.reader
    answer.tools = tools
    markers = form.markers if form is not None else ()
    if thought is not None:
        markers = (thought.start, thought.end, *markers)
    if thought is not None and is_open:
        yield from _read_thought(answer, thought, form)
    if isinstance(form, ChannelForm):
        yield from form.read(answer)
        return
    can_begin = form is not None
    while True:
        if can_begin and form is not None:
            can_begin = False
            if (yield from _begins(reader, form)):
                yield from _read_calls(answer, form, is_bare=bool(form.bare_start))
        marker = yield from answer.read_content(markers)
        if marker is None:
            return
        if thought is not None and marker == thought.start:
            yield from reader.choose((thought.label,))
            yield from _read_thought(answer, thought, form)
            can_begin = form is not None
        elif form is not None and marker in form.triggers:
            yield from _read_calls(answer, form)
        else:
            answer.end_text()  # an end without a beginning


def _begins(reader: Reader, form: ToolForm) -> Steps[bool]:
    reader.keep()
    try:
        return (yield from form.begins(reader))
    except EndOfAnswerError:
        if form.bare_start:
            return False
        raise  # the answer was cut off within a marker, which is no text
    finally:
        reader.restore()


def _read_thought(answer: Answer, thought: ReasoningMarks, form: ToolForm | None) -> Steps[None]:
    """Read reasoning and its end marker. If a call ends the reasoning, read the call, too."""
    triggers = form.triggers if form is not None else ()
    end: str | None = thought.start
    while end == thought.start:
        end = yield from answer.read_reasoning((thought.start, thought.end, *triggers))
        if end == thought.start:  # a model may write the start again, although the prompt has begun the reasoning
            yield from answer.reader.choose((thought.label,))
    if form is not None and end in triggers:
        yield from _read_calls(answer, form)


def _read_calls(answer: Answer, form: ToolForm, is_bare: bool = False) -> Steps[None]:
    """Read calls. Text after a trigger that turns out to be no call becomes content, without the trigger.

    Triggers within such text are ignored. Otherwise each of them could make the parser read the text to its end again.

    Args:
        is_bare: whether the calls have no trigger. Then an answer that ends before the name of a call is content.
    """
    reader = answer.reader
    if reader.place <= answer.failed_place:
        return
    reader.keep()
    calls = answer.call_count
    try:
        yield from form.read(answer)
    except FormError:
        if answer.call_count == calls:
            answer.failed_place = reader.place
            reader.restore()
    except EndOfAnswerError:
        if not is_bare or answer.call_count > calls:
            raise
        reader.restore()
    finally:
        reader.forget()


class AnswerParser:
    """The parser of one answer. It takes the text of each token, and returns the parts that this token makes certain.

    Args:
        read: the computation that reads the answer, for example `read_answer`.
        new_call_id: returns an id for a tool call.
    """

    def __init__(self, read: Callable[[Answer], Steps[None]], new_call_id: Callable[[], str] = new_call_id) -> None:
        self._answer = Answer(new_call_id)
        self._steps: Steps[None] | None = read(self._answer)
        self._starts: deque[int] = deque()
        """Ascending places in the reasoning, in characters, at which tokens begin that may belong to the end marker."""
        self.reasoning_tokens = 0
        """Number of tokens that begin within reasoning, without tokens of its markers."""
        self.has_open_call = False
        """Whether the answer has ended within the arguments of a call."""
        self._resume()

    @property
    def is_thinking(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._answer.is_thinking

    @property
    def held(self) -> str:
        """The last text that the model has written and that is in no part yet."""
        return self._answer.held

    def push(self, text: str) -> list[Part]:
        """Take the text of the next token, which may be empty. Return the parts that are certain now."""
        answer, reader = self._answer, self._answer.reader
        if text and (resting := reader.resting) is not None and resting[0].search(text) is None:
            resting[1](text)
            if answer.is_thinking:
                self.reasoning_tokens += 1 + len(self._starts)
                self._starts.clear()
            return self._taken()
        if answer.is_thinking:
            self._starts.append(self._start_of(text))
        if text:
            reader.feed(text)
            self._resume()
        if self._starts:
            self._count()
        return self._taken()

    def finish(self, text: str = "", is_cut_off: bool = False, follows: str = "") -> list[Part]:
        """End the answer. Return the parts that were held back.

        Args:
            text: text that comes after the text of the last token.
            is_cut_off: whether the answer was ended by anything but the model, such as a limit or a stop string.
            follows: the model's text after the answer, such as a stop string; "" if it is not known.
        """
        self._answer.reader.feed(text)
        self._answer.reader.end(is_cut_off, follows)
        self._resume()
        self._answer.close()
        self._count()
        return self._taken()

    def _start_of(self, text: str) -> int:
        """Return the place in the reasoning, in characters, at which a token begins."""
        start = self._answer.reasoning_length + self._answer.reader.unread
        # The text of a broken character comes with the next token, but belongs to the token before, which has no text.
        is_broken = text.startswith("\ufffd") and bool(self._starts) and self._starts[-1] == start
        return start + is_broken

    def _count(self) -> None:
        """Add the tokens whose first character is certain to be reasoning to `reasoning_tokens`."""
        read = self._answer.reasoning_length
        while self._starts and self._starts[0] < read:
            self._starts.popleft()
            self.reasoning_tokens += 1
        if not self._answer.is_thinking:
            self._starts.clear()

    def _resume(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
            except EndOfAnswerError:
                self._steps = None
                self.has_open_call = self._answer.ends_within_arguments

    def _taken(self) -> list[Part]:
        parts, self._answer.parts = self._answer.parts, []
        return join_parts(parts) if len(parts) > 1 else parts
