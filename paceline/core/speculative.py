"""--speculative-config: how a worker guesses tokens ahead. Fields have vLLM's names, where it has them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal, get_args

from paceline.core.errors import ConfigError

Method = Literal["ngram", "draft_model", "early_layers"]
RejectionSampleMethod = Literal["strict", "probabilistic"]

MOST_DRAFTS = 16


def _field(default: Any, help: str, method: Method | None = None) -> Any:
    """A field with its line of help; one that concerns a single method is refused with any other."""
    return dataclasses.field(default=default, metadata={"help": help, "method": method})


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """What to draft with, and how much. What a field means says its help."""

    method: Method = _field(dataclasses.MISSING, "ngram, draft_model or early_layers")
    num_speculative_tokens: int = _field(4, "drafts of a request in a step, at most")
    prompt_lookup_min: int = _field(2, "tokens at the end that must agree", "ngram")
    prompt_lookup_max: int = _field(4, "tokens at the end that are compared", "ngram")
    model: str = _field("", "folder of a model with the same vocabulary", "draft_model")
    num_layers: int = _field(0, "how many of the first layers draft", "early_layers")
    adaptive: bool = _field(True, "draft fewer, down to none, where that is faster")
    rejection_sample_method: RejectionSampleMethod = _field("strict", "strict or probabilistic")
    """strict accepts a draft where it is the token that would have been sampled without drafts. probabilistic accepts
    more drafts of a model at temperatures above 0; outputs have the same distribution, and are not the same."""

    @property
    def is_probabilistic(self) -> bool:
        return self.rejection_sample_method == "probabilistic"


def parse_speculative_config(text: str) -> SpeculativeConfig | None:
    """Reads the JSON of --speculative-config; "" is none. Raises ConfigError."""
    if not text.strip():
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is no JSON ({error}); write it like {_EXAMPLE}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--speculative-config must be a JSON object like {_EXAMPLE}")
    if "method" not in values and "model" in values:
        values["method"] = "draft_model"
    fields = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"--speculative-config has no field {name!r}; there are {', '.join(fields)}")
        _check_type(name, value, fields[name].default)
    if values.get("method") not in get_args(Method):
        raise ConfigError(
            f"--speculative-config needs a method: ngram, draft_model or early_layers, for example {_EXAMPLE}"
        )
    _check_method(values)
    if values.get("rejection_sample_method", "strict") not in get_args(RejectionSampleMethod):
        raise ConfigError("--speculative-config: rejection_sample_method must be strict or probabilistic")
    config = SpeculativeConfig(**values)
    _check_values(config)
    return config


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def _check_type(name: str, value: Any, default: Any) -> None:
    wanted = str if default is dataclasses.MISSING else type(default)
    if type(value) is not wanted:
        raise ConfigError(f"--speculative-config: {name} must be of type {wanted.__name__}, not {value!r}")


def _check_method(values: dict[str, Any]) -> None:
    """Refuses what the chosen method would ignore."""
    method = values["method"]
    methods = {field.name: field.metadata["method"] for field in dataclasses.fields(SpeculativeConfig)}
    for name in values:
        if methods[name] not in (None, method):
            own = ", ".join(name for name, other in methods.items() if other in (None, method))
            raise ConfigError(f"--speculative-config: {name} is for method {methods[name]}; {method} has {own}")


def _check_values(config: SpeculativeConfig) -> None:
    if not 1 <= config.num_speculative_tokens <= MOST_DRAFTS:
        raise ConfigError(f"--speculative-config: num_speculative_tokens must be from 1 to {MOST_DRAFTS}")
    if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
        raise ConfigError("--speculative-config: prompt_lookup_min must be from 1 to prompt_lookup_max")
    if config.method == "draft_model" and not config.model:
        raise ConfigError("--speculative-config: draft_model needs model, the folder of a smaller model")
    if config.method == "early_layers" and config.num_layers < 1:
        raise ConfigError("--speculative-config: early_layers needs num_layers, at least 1")


def speculative_help() -> str:
    """The fields of --speculative-config, one a line."""
    lines = []
    for field in dataclasses.fields(SpeculativeConfig):
        method, default = field.metadata["method"], field.default
        told = "" if default in (dataclasses.MISSING, "", 0) else f" [{str(default).lower()}]"
        lines.append(f"  {field.name}: {f'{method}: ' if method else ''}{field.metadata['help']}{told}")
    return "\n".join(lines)
