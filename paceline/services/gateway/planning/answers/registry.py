"""Forms by name, and the forms that fit a model's chat template.

Other packages add forms by entry points of the groups `paceline.tool_forms` (subclasses of `ToolForm`) and
`paceline.reasoning_forms` (instances of `ReasoningMarks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar

from paceline.core.errors import ConfigError
from paceline.services.gateway.planning.answers.form import ChannelForm, ReasoningMarks, ToolForm
from paceline.services.gateway.planning.answers.forms.deepseek import DeepSeek, DeepSeekV3, DeepSeekV31
from paceline.services.gateway.planning.answers.forms.gemma import FunctionGemma, Gemma4Form
from paceline.services.gateway.planning.answers.forms.granite import Granite
from paceline.services.gateway.planning.answers.forms.harmony import Harmony
from paceline.services.gateway.planning.answers.forms.hermes import Hermes
from paceline.services.gateway.planning.answers.forms.llama3_json import Llama3Json
from paceline.services.gateway.planning.answers.forms.mistral import Mistral
from paceline.services.gateway.planning.answers.forms.pythonic import Llama4Pythonic, Olmo3, Pythonic
from paceline.services.gateway.planning.answers.forms.qwen3_coder import Qwen3Coder

T = TypeVar("T")

TOOL_FORMS: Mapping[str, type[ToolForm]] = {
    "deepseek": DeepSeek,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "functiongemma": FunctionGemma,
    "gemma4": Gemma4Form,
    "granite": Granite,
    "granite4": Hermes,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "llama4_pythonic": Llama4Pythonic,
    "mistral": Mistral,
    "olmo3": Olmo3,
    "openai": Harmony,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
}

_THINK = ReasoningMarks("<think>", "</think>")

REASONING_FORMS: Mapping[str, ReasoningMarks] = {
    "deepseek_r1": ReasoningMarks("<think>", "</think>", always_open=True),
    "deepseek_v3": _THINK,
    "gemma4": ReasoningMarks("<|channel>", "<channel|>", label="thought\n"),
    "glm45": _THINK,
    "granite": _THINK,
    "kimi_vl": ReasoningMarks("◁think▷", "◁/think▷"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "openai_gptoss": Harmony.thought,
    "qwen3": _THINK,
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    "think": _THINK,
}

_TEMPLATE_TOOLS = (
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|header_start|>", "llama4_pythonic"),
    ("<function_calls>", "olmo3"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<|channel|>", "openai"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|im_start|>", "hermes"),
)
"""Pairs: a text in a chat template, and the form of its tool calls. The first text that is found counts."""

_TEMPLATE_REASONING = (
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("◁think▷", "kimi_vl"),
    ("<think>", "think"),
)
"""Pairs: a text in a chat template, or an added token, and the form of reasoning of such a model."""


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """The forms in which a model writes reasoning and tool calls; None for a form that it does not have."""

    thought: ReasoningMarks | None = None
    tools: ToolForm | None = None
    template_has_tools: bool = True
    """Whether the chat template shows tools to the model. If not, the gateway adds a system message with the tools."""


def choose_forms(tools: str, reasoning: str, template: str, own_tokens: Mapping[str, int]) -> AnswerForms:
    """Return the forms of a model.

    Args:
        tools: name of a form of tool calls; "auto" for the form that the template shows, "none" for no form.
        reasoning: name of a form of reasoning, "auto" or "none".
        template: the Jinja text of the chat template.
        own_tokens: ids of the tokens that were added to the model's vocabulary, by text.

    Raises:
        ConfigError: there is no form of this name, or the form of reasoning needs another form of tool calls.
    """
    if tools == "auto":
        tools = next((name for text, name in _TEMPLATE_TOOLS if text in template), "none")
    if reasoning == "auto":
        found = (name for text, name in _TEMPLATE_REASONING if text in template or text in own_tokens)
        reasoning = next(found, "none")
    form = _named(TOOL_FORMS, "paceline.tool_forms", tools, "--tool-call-parser")
    thought = _named(REASONING_FORMS, "paceline.reasoning_forms", reasoning, "--reasoning-parser")
    if form is not None and issubclass(form, ChannelForm):
        thought = form.thought  # one parser reads both
    elif reasoning == "openai_gptoss":
        raise ConfigError(f"--reasoning-parser {reasoning} needs --tool-call-parser openai, which reads both")
    return AnswerForms(thought, form() if form is not None else None, "tools" in template)


def _named(known: Mapping[str, T], group: str, name: str, flag: str) -> T | None:
    if name == "none":
        return None
    if name in known:
        return known[name]
    others: dict[str, Callable[[], T]] = {entry.name: entry.load for entry in entry_points(group=group)}
    if name in others:
        return others[name]()
    names = ", ".join(sorted({*known, *others}))
    raise ConfigError(f"{flag} {name} is not known; choose auto, none or one of: {names}")
