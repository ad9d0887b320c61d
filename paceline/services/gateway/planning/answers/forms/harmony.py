"""GPT-OSS's Harmony: an answer is a list of messages in channels, and a call is a message with a recipient.

<|channel|>analysis<|message|>They ask for rain.<|end|>
<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "rain"}<|call|>

(without the line break). The prompt ends with <|start|>assistant. Content is in the channel final, and in the channel
commentary if the message has no recipient. The recipient may also come before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Spelling, ToolSpelling, schema
from paceline.services.gateway.planning.answers.form import ChannelForm, ReasoningMarks
from paceline.services.gateway.planning.answers.reader import Steps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = " to="
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class Harmony(ChannelForm):
    """Reasoning, content and calls as messages in channels; see the module."""

    name = "openai"
    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    thought = ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>")
    between = "<|start|>assistant"

    def read(self, answer: Answer) -> Steps[None]:
        marker = yield from answer.reader.choose((_RECIPIENT,))
        if marker is None:
            marker = yield from answer.read_content(self.markers)
        while marker is not None:
            answer.end_text()
            if marker in (_RECIPIENT, _START, _CHANNEL):
                marker = yield from self._read_message(answer, marker)
            else:
                marker = yield from answer.read_content(self.markers)

    def write(self, name: str, arguments: str) -> str:
        return f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}{arguments}<|call|>"

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
        channels = {
            name: spelling.literal(f"{_CHANNEL}{name}{_MESSAGE}") for name in ("analysis", "commentary", "final")
        }
        # Messages before the last one. In a wanted format, the last one is all content, unless it is reasoning.
        analysis = [f"{channels['analysis']} TEXT"] if may_think else []
        earlier = [*analysis, *([f"{channels['commentary']} TEXT"] if content is None and not must_call else [])]
        last = [*analysis, *([] if must_call else [f"{channels['final']} {content or 'TEXT'}"])]
        last += [self._call(spelling, tool) for tool in tools] if may_call else []
        before = f"(({' | '.join(earlier)}) {spelling.literal(f'<|end|>{self.between}')})* " if earlier else ""
        return [f"body: {before}({' | '.join(last)})"]

    def _call(self, spelling: Spelling, tool: ToolSpelling) -> str:
        recipient = f"{_RECIPIENT}functions.{tool.name}"
        # The model calls tools in the channel of its reasoning, too.
        headers = [
            spelling.literal(header)
            for channel in (f"{_CHANNEL}commentary", f"{_CHANNEL}analysis")
            for header in (channel + recipient, recipient + channel)
        ]
        format_ = f'(" "? {spelling.literal(_CONSTRAIN)} "json" | " json")?'
        return f"({' | '.join(headers)}) {format_} {spelling.literal(_MESSAGE)} {schema(tool)}"

    def _read_message(self, answer: Answer, begin: str) -> Steps[str | None]:
        """Read a message after the first marker of its header. Return the marker after it; None if the answer ends."""
        reader = answer.reader
        pieces = [begin]
        while (marker := (yield from reader.pass_until(self.markers, pieces.append))) != _MESSAGE:
            if marker is None or marker in _ENDS:
                return marker  # a header without a message
            if marker == _START:
                pieces.clear()
            pieces.append(marker)
        header = "".join(pieces)
        if (function := _FUNCTION.search(header)) is not None:
            return (yield from self._read_call(answer, function[1]))
        if _ANALYSIS.search(header):
            return (yield from answer.read_reasoning(self.markers))
        return (yield from answer.read_content(self.markers))

    def _read_call(self, answer: Answer, name: str) -> Steps[str | None]:
        """Read a call after its header. Return the marker after the call; None if the answer ends.

        Arguments that are no JSON object become content.
        """
        reader = answer.reader
        yield from reader.skip_space()
        marker = yield from reader.choose(self.markers)
        if marker is not None:
            answer.begin_call(name)("{}")
            return marker
        if (yield from reader.peek()) != "{":
            return (yield from answer.read_content(self.markers))
        yield from reader.pass_json(answer.begin_call(name))
        return (yield from reader.pass_until(self.markers, lambda text: None))
