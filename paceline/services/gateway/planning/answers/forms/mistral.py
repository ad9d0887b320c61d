"""Mistral: a JSON list of calls after a marker, or, with newer tokenizers, a marker, name and arguments for each call.

[TOOL_CALLS][{"name": "find", "arguments": {"text": "rain"}, "id": "a1b2c3d4e"}]
[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{"text": "rain"}
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

from paceline.core.json_grammar.strings import quoted
from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Spelling, ToolSpelling, json_call, json_list, schema
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.forms.json_calls import read_calls
from paceline.services.gateway.planning.answers.reader import FormError, Steps

_NAME = re.compile(r"[^\s\[\]{}]*")
_ID = re.compile(r"[A-Za-z0-9]*")


class Mistral(ToolForm):
    """Calls after the marker [TOOL_CALLS], in the older or the newer form; see the module."""

    name = "mistral"
    trigger = "[TOOL_CALLS]"
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def new_call_id(self) -> str:
        # Mistral's chat templates refuse ids of another length.
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))

    def read(self, answer: Answer) -> Steps[None]:
        reader = answer.reader
        yield from reader.skip_space()
        if (yield from reader.peek()) == "[":
            yield from read_calls(answer, "arguments")
            return
        name = yield from reader.match(_NAME)
        call_id = None
        yield from reader.skip_space()
        if (yield from reader.choose(("[CALL_ID]",))):
            call_id = yield from reader.match(_ID)
            yield from reader.skip_space()
        yield from reader.choose(("[ARGS]",))
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{" or not name:
            raise FormError("the call has no name or no arguments")
        yield from reader.pass_json(answer.begin_call(name, call_id))

    def write(self, name: str, arguments: str) -> str:
        return f"[TOOL_CALLS]{name}[ARGS]{arguments}"

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        return "".join(self.write(name, arguments) for name, arguments in calls)

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        listed = json_list(" | ".join(json_call(tool, "name", "arguments") for tool in tools), parallel)
        call_id = f"({spelling.literal('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?"
        args = spelling.literal("[ARGS]")
        named = " | ".join(f"{quoted(tool.name)} {call_id} {args} {schema(tool)}" for tool in tools)
        return f"{named} | SPACE {listed}"
