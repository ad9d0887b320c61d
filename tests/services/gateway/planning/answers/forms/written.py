"""The grammar of a form's calls, and the texts that it allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.grammar import answer_grammar
from tests.services.gateway.planning.answers.vocabulary import Vocabulary


def tool(properties: dict[str, Any], required: Sequence[str] = (), name: str = "find", **schema: Any) -> ToolSpelling:
    """Return a tool with these properties."""
    return ToolSpelling(name, {"type": "object", "properties": properties, "required": list(required), **schema})


def allowed(vocabulary: Vocabulary, form: ToolForm, tools: Sequence[ToolSpelling], texts: Sequence[str]) -> list[str]:
    """Return the texts that are allowed as an answer that must call one of the tools."""
    grammar = answer_grammar(
        vocabulary.spelling,
        thought=None,
        is_open=False,
        budget=None,
        form=form,
        tools=tools,
        choice="required",
        parallel=True,
        content=None,
    )
    return [text for text in texts if vocabulary.allows(grammar, text)]
