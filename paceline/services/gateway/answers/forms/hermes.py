"""Hermes, Qwen 2.5 and 3, SmolLM2: JSON between tags, one object or a list of them.

<tool_call>
{"name": "find", "arguments": {"text": "rain"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.services.gateway.answers.answer import Answer
from paceline.services.gateway.answers.expressions import Spelling, Tool, json_call
from paceline.services.gateway.answers.form import ToolForm
from paceline.services.gateway.answers.forms.json_calls import read_calls
from paceline.services.gateway.answers.reader import Steps


class Hermes(ToolForm):
    """See the module."""

    name = "hermes"
    trigger = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def read(self, answer: Answer) -> Steps[None]:
        yield from read_calls(answer, "arguments")
        yield from answer.reader.skip_space()
        yield from answer.reader.choose(("</tool_call>",))

    def write(self, name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'

    def grammar(self, spelling: Spelling, tools: Sequence[Tool], parallel: bool) -> str:
        calls = " | ".join(json_call(tool, "name", "arguments") for tool in tools)
        return f'"\\n" ({calls}) "\\n" {spelling.literal("</tool_call>")}'
