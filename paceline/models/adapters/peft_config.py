"""The settings of an adapter: adapter_config.json as PEFT writes it. What is not understood is refused by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from paceline.core.adapters import CONFIG_FILE
from paceline.core.errors import ModelError
from paceline.models.adapters.expressions import Expression, StepBudget
from paceline.models.adapters.json_object import parse_object

_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config"),
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
    "modules_to_save": "merge the adapter into the model, or train it without whole modules",
}
_MOST_PATTERNS = 4096
"""Largest number of entries of rank_pattern and alpha_pattern."""

Targets: TypeAlias = Expression | frozenset[str]
"""Modules by a regular expression, or by names or ends of names."""
Biases: TypeAlias = Literal["none", "lora_only", "all"]
ALL_LINEAR = "all-linear"
HEAD = "lm_head"
_MOST_NUMBER = 1e9
_MOST_LISTS = 16
_NAME = re.compile(r"[\w.-]{1,256}")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of an adapter that matter for its results."""

    rank: int
    alpha: float
    targets: Targets | None
    """None for all linear layers but the head."""
    excluded: Targets = frozenset()
    rank_pattern: tuple[tuple[Expression, int], ...] = ()
    alpha_pattern: tuple[tuple[Expression, float], ...] = ()
    root_scale: bool = False
    """Whether the scale is alpha / sqrt(rank) (rsLoRA)."""
    layers: frozenset[int] = frozenset()
    """Numbers of the layers that have the adapter; empty for all."""
    layers_pattern: tuple[str, ...] = ()
    """Names of the lists of layers; empty for any."""
    has_bias: bool = False
    """Whether `lora_B` has a bias (lora_bias)."""
    has_magnitude: bool = False
    """Whether modules have lengths of their rows (DoRA)."""
    biases: Biases = "none"
    """The modules that have other biases of their own than the model."""

    def rank_of(self, module: str) -> int:
        return int(_pattern_value(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of the adapter's product in a module."""
        rank = self.rank_of(module)
        alpha = _pattern_value(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.root_scale else rank)

    def targets_module(self, module: str) -> bool:
        """Return whether the adapter has tensors for a linear layer with this name."""
        if _matches(self.excluded, module):
            return False
        if self.targets is None:
            return module.rpartition(".")[2] != HEAD  # as in PEFT
        return _matches(self.targets, module) and self._has_layer(module)

    def _has_layer(self, module: str) -> bool:
        if not self.layers or isinstance(self.targets, Expression) or module in (self.targets or ()):
            return True
        names = map(re.escape, self.layers_pattern)
        # The first number counts, because those of experts come later.
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in names] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return found is not None and int(found[1]) in self.layers


def _matches(wanted: Targets, module: str) -> bool:
    if isinstance(wanted, Expression):
        return wanted.matches(module)
    parts = module.split(".")
    return any(".".join(parts[start:]) in wanted for start in range(len(parts)))


def _pattern_value(patterns: tuple[tuple[Expression, float], ...], module: str, default: float) -> float:
    """Return the value of the first expression that matches the module's name or its end."""
    return next((value for expression, value in patterns if expression.matches_end(module)), default)


def read_peft_config(content: bytes) -> PeftConfig:
    """Return the settings of an adapter. Raises ModelError for settings that cannot be served, with the key's name."""
    values = parse_object(content, CONFIG_FILE)
    if str(values.get("peft_type")).upper() != "LORA":
        raise ModelError(f"{CONFIG_FILE}: peft_type is {values.get('peft_type')!r:.80}; only LORA can be served")
    reader = _Reader({name: value for name, value in values.items() if name not in _WITHOUT_EFFECT})
    config = PeftConfig(
        rank=reader.number("r", 8),
        alpha=float(reader.number("lora_alpha", 8, least=-_MOST_NUMBER)),
        targets=reader.targets(),
        excluded=reader.names("exclude_modules"),
        rank_pattern=reader.numbers("rank_pattern"),
        alpha_pattern=reader.numbers("alpha_pattern", least=-_MOST_NUMBER),
        root_scale=reader.flag("use_rslora"),
        layers=reader.layers(),
        layers_pattern=reader.layer_lists(),
        has_bias=reader.flag("lora_bias"),
        has_magnitude=reader.flag("use_dora"),
        biases=reader.biases(),
    )
    reader.finish()
    return config


class _Reader:
    """Takes the values of adapter_config.json one by one. Raises ModelError for values of a wrong type."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._steps = StepBudget()

    def number(self, name: str, default: int, least: float = 1) -> Any:
        return self._checked(name, self._values.pop(name, default), least)

    def numbers(self, name: str, least: float = 1) -> tuple[tuple[Expression, Any], ...]:
        values = self._values.pop(name, None) or {}
        if not isinstance(values, dict) or len(values) > _MOST_PATTERNS:
            raise _wrong(name, f"an object of at most {_MOST_PATTERNS} numbers")
        return tuple((self._expression(name, key), self._checked(name, own, least)) for key, own in values.items())

    def _checked(self, name: str, value: Any, least: float) -> Any:
        kinds = int if least == 1 else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < _MOST_NUMBER:
            raise _wrong(name, "a positive whole number" if least == 1 else "a number")
        return value

    def flag(self, name: str) -> bool:
        value = self._values.pop(name, None)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, "true or false")
        return bool(value)

    def biases(self) -> Biases:
        value = self._values.pop("bias", "none")
        if value not in get_args(Biases):
            raise _wrong("bias", f"one of {', '.join(get_args(Biases))}")
        found: Biases = value
        return found

    def targets(self) -> Targets | None:
        if self._values.get("target_modules") == ALL_LINEAR:
            del self._values["target_modules"]
            return None
        found = self.names("target_modules")
        if not found:
            raise ModelError(
                f"{CONFIG_FILE}: target_modules is missing, so it does not say which layers the adapter changes"
            )
        return found

    def names(self, name: str) -> Targets:
        value = self._values.pop(name, None) or []
        if isinstance(value, str):
            return self._expression(name, value)
        if not _are_texts(value):
            raise _wrong(name, "a list of names or a regular expression")
        return frozenset(value)

    def layers(self) -> frozenset[int]:
        value = self._values.pop("layers_to_transform", None)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in numbers):
            raise _wrong("layers_to_transform", "a number or a list of numbers")
        return frozenset(numbers)

    def layer_lists(self) -> tuple[str, ...]:
        value = self._values.pop("layers_pattern", None) or []
        names = [value] if isinstance(value, str) else value
        if not _are_texts(names) or len(names) > _MOST_LISTS or not all(_NAME.fullmatch(each) for each in names):
            raise _wrong("layers_pattern", "the name of a list of layers, such as layers, or a list of some names")
        return tuple(names)

    def _expression(self, name: str, text: str) -> Expression:
        try:
            return Expression(text, self._steps)
        except ValueError as error:
            raise _wrong(
                name, f"a regular expression that ends in bounded time, unlike {text!r:.80}: {error}"
            ) from None

    def finish(self) -> None:
        """Refuse all other settings that change results."""
        start = self._values.pop("init_lora_weights", True)
        if start not in _STARTS:
            raise ModelError(
                f"{CONFIG_FILE}: init_lora_weights {start!r:.80} changes the base model's weights, which are shared; "
                "convert the adapter to a plain one with PEFT (path_initial_model_for_weight_conversion)"
            )
        if wrong := next((name for name, value in self._values.items() if value not in (None, False, [], {}, "")), ""):
            advice = _ADVICE.get(wrong, "merge the adapter into the model, or train it without this option")
            raise ModelError(f"{CONFIG_FILE}: {wrong!r:.80} is not supported; {advice}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _wrong(name: str, wanted: str) -> ModelError:
    return ModelError(f"{CONFIG_FILE}: {name} must be {wanted}")
