"""Hermes, Qwen 2.5 and 3, SmolLM2: JSON between tags, one object or a list of them.

<tool_call>
{"name": "find", "arguments": {"text": "rain"}}
</tool_call>

Hermes 2 Pro and 3 were trained with the arguments before the name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import (
    Spelling,
    ToolSpelling,
    json_object,
    json_text,
    schema,
)
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.forms.json_calls import read_calls
from paceline.services.gateway.planning.answers.reader import Steps


class Hermes(ToolForm):
    """JSON calls between tags; see the module."""

    name = "hermes"
    trigger = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def read(self, answer: Answer) -> Steps[None]:
        yield from read_calls(answer, "arguments")
        yield from answer.reader.skip_space()
        yield from answer.reader.choose(("</tool_call>",))

    def write(self, name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        calls, rules = [], []
        for number, tool in enumerate(tools):
            members = ("name", json_text(tool.name)), ("arguments", f"arguments_{number}")
            calls += [json_object(*members), json_object(*reversed(members))]
            rules.append(f"arguments_{number}: {schema(tool)}")
        return "\n".join([f'"\\n" ({" | ".join(calls)}) "\\n" {spelling.literal("</tool_call>")}', *rules])
