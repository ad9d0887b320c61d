"""The choice of forms by name and by chat template."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.services.gateway.planning.answers.registry import REASONING_FORMS, TOOL_FORMS, choose_forms


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<|im_start|>' }}<tool_call>{% if tools %}<think>", "hermes", "think"),
        ("{{ '<|start_header_id|>' }}{{ '<|python_tag|>' }}", "llama3_json", "none"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json", "none"),
        ("{{ '<|header_start|>' }}<|python_start|>", "llama4_pythonic", "none"),
        ("<|im_start|><function_calls>", "olmo3", "none"),
        ("[func_name1(params_name1=params_value1)]", "pythonic", "none"),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("<|start_of_role|><|tool_call|>", "granite", "none"),
        ("<｜tool▁calls▁begin｜></think><think>", "deepseek", "think"),
        ("<tool_call><function={{ name }}> <think>", "qwen3_coder", "think"),
        ("<start_function_call>call:{{ name }}", "functiongemma", "none"),
        ("<|tool_call>call:{{ name }} <|channel>thought\n", "gemma4", "gemma4"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
        ("<seed:think>", "none", "seed_oss"),
        ("{{ messages }}", "none", "none"),
    ],
)
def test_a_chat_template_shows_the_forms(template: str, tools: str, reasoning: str) -> None:
    forms = choose_forms("auto", "auto", template, {})
    assert (forms.tools.name if forms.tools is not None else "none") == tools
    assert forms.thought == REASONING_FORMS.get(reasoning)


def test_each_form_can_be_named() -> None:
    for name, form in TOOL_FORMS.items():
        assert isinstance(choose_forms(name, "none", "", {}).tools, form)
    for name in REASONING_FORMS.keys() - {"openai_gptoss"}:
        assert choose_forms("none", name, "", {}).thought == REASONING_FORMS[name]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser hermit is not known.*deepseek.*hermes"):
        choose_forms("hermit", "none", "", {})


def test_a_form_of_channels_reads_reasoning_and_calls_or_neither() -> None:
    forms = choose_forms("openai", "none", "", {})
    assert forms.thought is not None
    assert choose_forms("none", "auto", "<|channel|>", {"<|channel|>": 5}).thought is None
    with pytest.raises(ConfigError, match="--tool-call-parser openai"):
        choose_forms("none", "openai_gptoss", "", {})
