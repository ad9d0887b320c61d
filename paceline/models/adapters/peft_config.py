"""The settings of an adapter: adapter_config.json as PEFT writes it. What is not understood is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.adapters import CONFIG_FILE
from paceline.core.errors import ModelError

_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core", "peft_type", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "task_type"),
    )
)
"""Keys that change nothing in the results of an adapter with linear layers. `fan_in_fan_out` says how the base model
stores its matrices, not the adapter.
"""
_STARTS = (True, False, "true", "false", "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""
_ADVICE = {
    "use_dora": "merge the adapter into the model, or train it without DoRA",
    "modules_to_save": "merge the adapter into the model, or train it without whole modules",
    "bias": "only bias none can be served; merge the adapter into the model",
}
_MOST_PATTERN_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of an adapter that matter for its results."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    """Names of modules, a regular expression, or "all-linear"."""
    excluded: str | tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    root_scale: bool = False
    """Whether the scale is alpha / sqrt(rank) (rsLoRA)."""
    layers: tuple[int, ...] | None = None
    """Numbers of the layers that have the adapter; None for all."""
    layers_pattern: tuple[str, ...] = ()
    """Names of the lists of layers; empty for any."""
    has_bias: bool = False
    """Whether `lora_B` has a bias (lora_bias)."""

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_key_of(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the adapter's product in a module."""
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.get(_key_of(self.alpha_pattern, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.root_scale else rank)

    def targets_module(self, module: str) -> bool:
        """Return whether the adapter has tensors for a linear layer with this name."""
        if self.excluded and _matches(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return True
        return _matches(self.targets, module) and self._has_layer(module)

    def _has_layer(self, module: str) -> bool:
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        patterns = [rf".*\.{name}\.(\d+)\." for name in self.layers_pattern] or [r".*\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return found is not None and int(found[1]) in self.layers


def _matches(wanted: str | tuple[str, ...], module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _key_of(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first key that is a name of the module or of its end, as a regular expression; "" if none is."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), "")


def read_peft_config(content: bytes) -> PeftConfig:
    """Return the settings of an adapter. Raises ModelError for settings that cannot be served, with the key's name."""
    try:
        values: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{CONFIG_FILE} must be a JSON object")
    if str(values.get("peft_type")).upper() != "LORA":
        raise ModelError(f"{CONFIG_FILE}: peft_type is {values.get('peft_type')!r}; only LORA can be served")
    reader = _Reader({name: value for name, value in values.items() if name not in _WITHOUT_EFFECT})
    config = PeftConfig(
        rank=reader.number("r", 8),
        alpha=float(reader.number("lora_alpha", 8, least=-math.inf)),
        targets=reader.names("target_modules"),
        excluded=reader.names("exclude_modules"),
        rank_pattern=reader.numbers("rank_pattern"),
        alpha_pattern=reader.numbers("alpha_pattern", least=-math.inf),
        root_scale=reader.flag("use_rslora"),
        layers=reader.layers(),
        layers_pattern=reader.layer_lists(),
        has_bias=reader.flag("lora_bias"),
    )
    if not config.targets:
        raise ModelError(
            f"{CONFIG_FILE}: target_modules is missing, so it does not say which layers the adapter changes"
        )
    reader.finish()
    return config


class _Reader:
    """Takes the values of adapter_config.json one by one. Raises ModelError for values of a wrong type."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def number(self, name: str, default: int, least: float = 1) -> Any:
        return self._checked(name, self._values.pop(name, default), least)

    def numbers(self, name: str, least: float = 1) -> dict[str, Any]:
        values = self._values.pop(name, None) or {}
        if not isinstance(values, dict):
            raise _wrong(name, "an object of numbers")
        return {self._pattern(name, key): self._checked(name, value, least) for key, value in values.items()}

    def _checked(self, name: str, value: Any, least: float) -> Any:
        kinds = int if least == 1 else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < 1e9 or value != value:
            raise _wrong(name, "a positive whole number" if least == 1 else "a number")
        return value

    def flag(self, name: str) -> bool:
        value = self._values.pop(name, None)
        if value not in (None, True, False):
            raise _wrong(name, "true or false")
        return bool(value)

    def names(self, name: str) -> str | tuple[str, ...]:
        value = self._values.pop(name, None)
        if isinstance(value, str):
            return value if value == "all-linear" else self._pattern(name, value)
        if not isinstance(value or [], list) or not all(isinstance(each, str) for each in value or ()):
            raise _wrong(name, "a list of names or a regular expression")
        return tuple(value or ())

    def layers(self) -> tuple[int, ...] | None:
        value = self._values.pop("layers_to_transform", None)
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) for each in numbers):
            raise _wrong("layers_to_transform", "a number or a list of numbers")
        return tuple(numbers) or None

    def layer_lists(self) -> tuple[str, ...]:
        value = self._values.pop("layers_pattern", None) or ()
        names: Sequence[Any] = [value] if isinstance(value, str) else value
        if not all(isinstance(each, str) for each in names):
            raise _wrong("layers_pattern", "a name or a list of names")
        return tuple(self._pattern("layers_pattern", each) for each in names)

    def _pattern(self, name: str, text: str) -> str:
        try:
            if len(text) > _MOST_PATTERN_CHARACTERS:
                raise _wrong(name, f"no longer than {_MOST_PATTERN_CHARACTERS} characters")
            re.compile(text)
        except (re.error, RecursionError, OverflowError):
            raise _wrong(name, f"a regular expression, unlike {text!r:.80}") from None
        return text

    def finish(self) -> None:
        """Refuse all other settings that change results."""
        start = self._values.pop("init_lora_weights", True)
        if start not in _STARTS:
            raise ModelError(
                f"{CONFIG_FILE}: init_lora_weights {start!r} changes the base model's weights, which are shared; "
                "convert the adapter to a plain one with PEFT (path_initial_model_for_weight_conversion)"
            )
        if self._values.get("bias") == "none":
            del self._values["bias"]
        if wrong := next((name for name, value in self._values.items() if value not in (None, False, [], {}, "")), ""):
            advice = _ADVICE.get(wrong, "merge the adapter into the model, or train it without this option")
            raise ModelError(f"{CONFIG_FILE}: {wrong} is not supported; {advice}")


def _wrong(name: str, wanted: str) -> ModelError:
    return ModelError(f"{CONFIG_FILE}: {name} must be {wanted}")
