"""Forms by name and by chat template."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.services.gateway.answers.registry import TOOL_FORMS, choose_forms


@pytest.mark.parametrize(
    ("template", "tools", "reasoning_end"),
    [
        ("<tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes", None),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder", None),
        ("<tool_call><function={{ name }}> <think>", "qwen3_coder", "</think>"),
        ("<start_function_call>call:{{ name }}", "functiongemma", None),
        ("<|tool_call>call:{{ name }} <|channel>thought\n", "gemma4", "<channel|>"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "<|end|>"),
    ],
)
def test_the_template_shows_the_form(template: str, tools: str, reasoning_end: str | None) -> None:
    forms = choose_forms("auto", "auto", template, {})
    assert type(forms.tools) is TOOL_FORMS[tools]
    assert (forms.thought.end if forms.thought is not None else None) == reasoning_end


def test_a_form_of_channels_reads_reasoning_and_calls_or_neither() -> None:
    forms = choose_forms("openai", "none", "", {})
    assert forms.thought is not None
    assert choose_forms("none", "auto", "<|channel|>", {"<|channel|>": 5}).thought is None
    with pytest.raises(ConfigError, match="--tool-call-parser openai"):
        choose_forms("none", "openai_gptoss", "", {})
