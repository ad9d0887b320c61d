"""Schemas of tools' arguments: what is enforced, what is loosened, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.schemas import ChatRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.planning.constraints.making import chat_constraint
from tests.services.gateway.toy_model import write_toy_model

HERMES = choose_forms("hermes", "none", "", {})
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy") / "model")


def allowed(folder: Path, function: dict[str, Any]) -> list[str]:
    """Return which of some arguments a function may be called with."""
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    )
    constraint = chat_constraint(request, HERMES, Tokenizer(folder), "")
    assert constraint is not None
    vocabulary = Vocabulary(folder, ())
    call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    candidates = ("{}", '{"city": "Rome"}', '{"town": 1}')
    return [arguments for arguments in candidates if vocabulary.allows(constraint.text, call.format(arguments))]


def test_what_the_schema_says_is_enforced_unless_it_is_out_of_reach(folder: Path) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(900):
        deep = {"type": "object", "properties": {"a": deep}}
    anything = ["{}", '{"city": "Rome"}', '{"town": 1}']
    assert allowed(folder, {"parameters": CITY}) == ['{"city": "Rome"}']
    assert allowed(folder, {"parameters": CITY, "strict": False}) == ['{"city": "Rome"}']
    assert allowed(folder, {}) == ["{}"]
    assert allowed(folder, {"parameters": {"type": "object"}}) == anything
    assert allowed(folder, {"parameters": deep}) == anything
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        allowed(folder, {"parameters": deep, "strict": True})


def test_arguments_are_an_object(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="type must be object") as error:
        allowed(folder, {"parameters": {"type": "array"}})
    assert error.value.param == "tools[0].function.parameters"
