"""The options of --speculative-config, by which a worker drafts tokens. Fields that vLLM has have the same names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.core.errors import ConfigError

Method = Literal["ngram", "draft_model", "early_layers"]
RejectionSampleMethod = Literal["strict", "probabilistic"]

MOST_DRAFTS = 16


def _field(default: Any, help: str, method: Method | None = None) -> Any:
    """Return a field with its line of help. A field with a `method` is refused if another method is chosen."""
    return dataclasses.field(default=default, metadata={"help": help, "method": method})


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The options of speculative decoding. Each field is explained by its help text."""

    method: Method = _field(dataclasses.MISSING, "ngram, draft_model or early_layers")
    num_speculative_tokens: int = _field(4, "most drafts of a sequence in a step")
    prompt_lookup_min: int = _field(2, "shortest match, in tokens", "ngram")
    prompt_lookup_max: int = _field(4, "longest match, in tokens", "ngram")
    model: str = _field("", "model with the same vocabulary, given like MODEL", "draft_model")
    revision: str = _field("", "branch, tag or commit of a model on the hub", "draft_model")
    num_layers: int = _field(0, "number of first layers that draft", "early_layers")
    adaptive: bool = _field(True, "draft fewer tokens, or none, if that is faster")
    rejection_sample_method: RejectionSampleMethod = _field("strict", "strict or probabilistic")
    """"strict" accepts a draft only if it equals the token that would have been sampled without drafts, so outputs do
    not change. "probabilistic" accepts more of a draft model's tokens at temperatures above 0: outputs change, but have
    the same distribution.
    """

    @property
    def is_probabilistic(self) -> bool:
        return self.rejection_sample_method == "probabilistic"


def parse_speculative_config(text: str) -> SpeculativeConfig | None:
    """Parse the JSON of --speculative-config; return None for an empty text. Raises ConfigError if it is not valid."""
    if not text.strip():
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not JSON ({error}); write it like {_EXAMPLE}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--speculative-config must be a JSON object like {_EXAMPLE}")
    if "method" not in values and "model" in values:
        values["method"] = "draft_model"
    fields = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"--speculative-config has no field {name!r}; its fields are {', '.join(fields)}")
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
    """Refuse fields that the chosen method would ignore."""
    method = values["method"]
    methods = {field.name: field.metadata["method"] for field in dataclasses.fields(SpeculativeConfig)}
    for name in values:
        if methods[name] not in (None, method):
            allowed = ", ".join(name for name, other in methods.items() if other in (None, method))
            raise ConfigError(f"--speculative-config: {name} is for method {methods[name]}; {method} has {allowed}")


def _check_values(config: SpeculativeConfig) -> None:
    if not 1 <= config.num_speculative_tokens <= MOST_DRAFTS:
        raise ConfigError(f"--speculative-config: num_speculative_tokens must be from 1 to {MOST_DRAFTS}")
    if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
        raise ConfigError("--speculative-config: prompt_lookup_min must be from 1 to prompt_lookup_max")
    if config.method == "draft_model" and not config.model:
        raise ConfigError("--speculative-config: draft_model needs model, a smaller model")
    if config.method == "early_layers" and config.num_layers < 1:
        raise ConfigError("--speculative-config: early_layers needs num_layers, at least 1")


def with_draft_folder(text: str, folder: Path) -> str:
    """Return the JSON of --speculative-config with the draft model's folder in place of its name and revision."""
    values = json.loads(text) | {"model": str(folder)}
    values.pop("revision", None)
    return json.dumps(values)


def speculative_help() -> str:
    """Return the help of --speculative-config: one line for each field."""
    lines = []
    for field in dataclasses.fields(SpeculativeConfig):
        method, default = field.metadata["method"], field.default
        told = "" if default in (dataclasses.MISSING, "", 0) else f" [{str(default).lower()}]"
        lines.append(f"  {field.name}: {f'{method}: ' if method else ''}{field.metadata['help']}{told}")
    return "\n".join(lines)
