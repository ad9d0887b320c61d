"""Llama 3.1 to 3.3: JSON that is the whole answer, or that follows a marker; semicolons separate calls.

{"name": "find", "parameters": {"text": "rain"}}; {"name": "stop", "parameters": {}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.expressions import Spelling, ToolSpelling, json_call
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.forms.json_calls import read_calls
from paceline.services.gateway.planning.answers.reader import Reader, Steps


class Llama3Json(ToolForm):
    """Calls as JSON objects, with or without a marker; see the module.

    An answer in JSON is content if the first member of the object is not "name".
    """

    name = "llama3_json"
    trigger = "<|python_tag|>"
    markers = ("<|python_tag|>",)
    bare_start = (r"\{", '"name"')
    repeats = False

    def begins(self, reader: Reader) -> Steps[bool]:
        for text in ("{", '"name"'):
            yield from reader.skip_space()
            if (yield from reader.choose((text,))) is None:
                return False
        return True

    def read(self, answer: Answer) -> Steps[None]:
        reader = answer.reader
        more = True
        while more:
            yield from read_calls(answer, "parameters", "arguments")
            yield from reader.skip_space()
            yield from reader.choose((";",))
            reader.keep()
            more = yield from self.begins(reader)
            reader.restore()

    def write(self, name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {arguments}}}'

    def write_all(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(self.write(name, arguments) for name, arguments in calls)

    def grammar(self, spelling: Spelling, tools: Sequence[ToolSpelling], parallel: bool) -> str:
        more = '(SPACE ";" SPACE form_call)*' if parallel else ""
        return f"form_call {more}\nform_call: " + " | ".join(json_call(tool, "name", "parameters") for tool in tools)
