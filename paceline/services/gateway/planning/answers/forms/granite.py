"""Granite 3: a JSON list of calls after a marker. Granite 4 writes as Hermes does.

<|tool_call|>[{"name": "find", "arguments": {"text": "rain"}}]
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Spelling, ToolSpelling, json_call, json_list
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.forms.json_calls import read_calls
from paceline.services.gateway.planning.answers.reader import Steps


class Granite(ToolForm):
    """A marker and a JSON list of calls; see the module. Granite 3.1 writes the marker as `<tool_call>`."""

    name = "granite"
    trigger = "<|tool_call|>"
    aliases = ("<tool_call>",)
    markers = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    repeats = False

    def read(self, answer: Answer) -> Steps[None]:
        yield from read_calls(answer, "arguments")

    def write(self, name: str, arguments: str) -> str:
        return self.write_all([(name, arguments)])

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        return self.trigger + write_list(calls)

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        return "SPACE " + json_list(" | ".join(json_call(tool, "name", "arguments") for tool in tools), parallel)


def write_list(calls: Sequence[tuple[str, str]]) -> str:
    """Return calls as a JSON list. Each call is a name and its arguments as JSON text."""
    written = (f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}' for name, text in calls)
    return f"[{', '.join(written)}]"
