"""Checked access to the fields of config.json, for the readers of families."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import ModelError
from paceline.models.formats import find_format
from paceline.models.model_config import Activation, LayerType, Rope

Json = Mapping[str, Any]

LAYER_TYPES: Mapping[str, LayerType] = {"full_attention": "full", "sliding_attention": "sliding"}
"""Names of attention layers in `layer_types`."""


_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("layer_types", "layers_block_type", "no_rope_layers", "mlp_only_layers", "time_step_limit"), list),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "per_layer_config", "quantization_config"), dict),
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), dict),
    **dict.fromkeys(("hidden_act", "hidden_activation", "position_embedding_type", "topk_method", "scoring_func"), str),
}
"""The types of fields that are not numbers. These fields may be missing or null."""
_KIND_NAMES: Mapping[type, str] = {list: "a list", dict: "an object", str: "a text"}
_MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"), 1 << 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), 1 << 40),
}
_MOST_OF_OTHERS = 1 << 20
"""The largest sizes that are read. A broken config.json must not keep workers busy until their memory is full."""


class NotNativeError(ModelError):
    """No model file of Paceline computes the model that config.json describes. The model's own code in transformers may
    do it.
    """


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of config.json, or of an object in it."""

    raw: Json
    architecture: str

    def get(self, name: str, default: Any) -> Any:
        """Return a field; `default` if it is missing or null."""
        value = self.raw.get(name)
        return default if value is None else value

    def with_defaults(self, **defaults: Any) -> Fields:
        """Return the same fields, with missing fields taken from `defaults`. A field that is null is not missing."""
        return Fields({**defaults, **self.raw}, self.architecture)

    def changed(self, **values: Any) -> Fields:
        """Return the same fields with other values for some of them."""
        return Fields({**self.raw, **values}, self.architecture)

    def text_part(self) -> Fields:
        """Return the fields of the text model, if this is a model for several media; else the same fields."""
        text = self.raw.get("text_config")
        if text is None:
            return self
        outer = {name: self.raw.get(name) for name in ("dtype", "torch_dtype")}
        tied = {"tie_word_embeddings": self.raw.get("tie_word_embeddings")}
        parts = [{name: value for name, value in part.items() if value is not None} for part in (outer, text, tied)]
        part = Fields({**parts[0], **parts[1], **parts[2]}, self.architecture)
        part.refuse_unsupported()
        return part

    def part(self, name: str) -> Fields | None:
        """Return the fields of an object in config.json; None if it is missing or null."""
        raw = self.raw.get(name)
        return None if raw is None else Fields(raw, self.architecture)

    def with_rope(self, default: Json) -> Fields:
        """Return the same fields, with `default` as `rope_parameters` if config.json has no rotary parameters of any
        version's style.
        """
        if self.raw.get("rope_parameters") is not None or self.raw.get("rope_scaling"):
            return self
        return self.changed(rope_parameters=default)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number; `default` if the field is missing. Raises ModelError for any other value, or
        without a value.
        """
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{name} must be a positive whole number, not {value!r:.80}")
        most = _MOST.get(name, _MOST_OF_OTHERS)
        if value > most:
            raise ModelError(f"{name} must be at most {most}, not {value!r:.80}")
        return value

    def count(self, name: str, default: int) -> int:
        """Return a whole number that may be 0. Raises ModelError if the field has another value."""
        return 0 if self.get(name, default) == 0 else self.size(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """Return whether a field is true. Null counts as false, as in transformers; the fields of `text_part` have no
        nulls.

        Raises ModelError if the field has another value.
        """
        value = self.raw.get(name, default)
        if value not in (None, False, True):
            raise ModelError(f"{name} must be true or false, not {value!r:.80}")
        return bool(value)

    def number(self, name: str, default: float) -> float:
        """Return a number that may be 0. Raises ModelError if the field is negative, not finite, or no number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ModelError(f"{name} must be a finite number that is not negative, not {value!r:.80}")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """Return a number above 0. Raises ModelError if the field has another value."""
        value = self.number(name, default)
        if not value:
            raise ModelError(f"{name} must be above 0")
        return value

    def common(self) -> dict[str, Any]:
        """Return the arguments of ModelConfig that every architecture reads in the same way."""
        dtype = str(self.get("dtype", self.get("torch_dtype", "float32")))
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ModelError(f"dtype {dtype} is not supported; supported are: bfloat16, float16, float32")
        return {
            "architecture": self.architecture,
            "vocab_size": self.size("vocab_size"),
            "hidden_size": self.size("hidden_size"),
            "intermediate_size": self.size("intermediate_size"),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "dtype": dtype,
        }

    def activation(self, name: str, default: str) -> Activation:
        known: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
        value = self.get(name, default)
        if value not in known:
            raise NotNativeError(f"{name} {value!r} is not supported; supported are: {', '.join(known)}")
        return known[value]

    def rope(self, default_theta: float, max_position: int, head_dim: int = 0, part: float = 1.0) -> Rope:
        """Return the rotary embedding of a model that has one for all layers. Fields of all versions of transformers
        are read.

        Args:
            head_dim: size of a head of which only a part may be rotated; 0 if the architecture rotates whole heads.
            part: share of a head's dimensions that are rotated if config.json does not say it, from 0 to 1.
        """
        part = self.number("partial_rotary_factor", part)
        parameters = {"partial_rotary_factor": part, **self.rope_parameters()}
        return read_rope(parameters, self.positive("rope_theta", default_theta), max_position, head_dim)

    def rope_parameters(self) -> Json:
        """Return `rope_parameters` of transformers 5, or `rope_scaling` and `rope_theta` of transformers 4 in one.

        If both are given, `rope_scaling` takes precedence, as in transformers: model cards ask users to add it for long
        contexts.
        """
        found: Json = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        outer = self.raw.get("original_max_position_embeddings")
        original = {} if outer is None else {"original_max_position_embeddings": outer}
        return {"rope_theta": self.raw.get("rope_theta"), **found, **original}

    def refuse_unsupported(self) -> None:
        """Raise ModelError if a field that every architecture may have asks for something that no model file
        supports.
        """
        for name, kind in _KINDS.items():
            value = self.raw.get(name)
            if value is not None and not isinstance(value, kind):
                raise ModelError(f"{name} must be {_KIND_NAMES[kind]}, not {value!r:.80}")
        find_format(self.raw)
        is_known = self.architecture in ("Gemma3ForCausalLM", "ColPaliForRetrieval")
        if not is_known and self.get("use_bidirectional_attention", "vision") not in (False, "vision"):
            raise ModelError(f"bidirectional attention is not supported for {self.architecture}")
        if self.raw.get("is_causal") is False:
            raise ModelError(f"is_causal false is not supported for {self.architecture}")
        if self.raw.get("rope_interleaved"):
            raise NotNativeError("an interleaved rotary embedding is not supported")


def read_layer_types(names: Sequence[str], known: Mapping[str, LayerType], layers: int) -> tuple[LayerType, ...]:
    """Return the types of `layers` layers, whose names in config.json are keys of `known`."""
    unknown = sorted({str(name) for name in names} - set(known))
    if unknown:
        raise NotNativeError(f"layer type {unknown[0]} is not supported; supported are: {', '.join(known)}")
    if len(names) != layers:
        raise ModelError(f"layer_types names {len(names)} layers, num_hidden_layers {layers}")
    return tuple(known[name] for name in names)


def read_rope(parameters: Json, default_theta: float, max_position: int, head_dim: int = 0) -> Rope:
    """Return the rotary embedding that `Fields.rope_parameters` describe.

    Args:
        head_dim: size of a head of which only a part may be rotated; 0 if the architecture rotates whole heads.
    """
    part = _number(parameters, "partial_rotary_factor", 1.0)
    if part == 1.0:
        return _read_scaling(parameters, default_theta, max_position)
    if not head_dim:
        raise NotNativeError("a partial rotary embedding (partial_rotary_factor) is not supported")
    rotated = int(head_dim * part)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise NotNativeError(f"partial_rotary_factor {part} must rotate an even number of {head_dim} dimensions")
    return replace(_read_scaling(parameters, default_theta, max_position), rotated_dims=rotated)


def _read_scaling(parameters: Json, default_theta: float, max_position: int) -> Rope:
    theta = read_factor(parameters, "rope_theta", default_theta)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise NotNativeError(f"rope type {kind} is not supported; supported are: default, linear, llama3, yarn")
    if kind == "yarn":
        return _read_yarn(parameters, theta, max_position)
    factor = read_factor(parameters, "factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low, high = read_factor(parameters, "low_freq_factor"), read_factor(parameters, "high_freq_factor")
    if high <= low:
        raise ModelError(f"rope's high_freq_factor ({high}) must be above its low_freq_factor ({low})")
    original = int(read_factor(parameters, "original_max_position_embeddings", max_position))
    return Rope(theta, "llama3", factor, low, high, original)


def _read_yarn(parameters: Json, theta: float, max_position: int) -> Rope:
    """Read the fields of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071)."""
    if theta == 1.0:
        raise ModelError("rope's rope_theta must not be 1 with the type yarn")
    original = int(read_factor(parameters, "original_max_position_embeddings", max_position))
    factor = read_factor(parameters, "factor", max_position / original)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dims = (_number(parameters, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    attention_factor = magnitude(mscale) / magnitude(all_dims) if mscale and all_dims else magnitude(1.0)
    if parameters.get("attention_factor") is not None:
        attention_factor = read_factor(parameters, "attention_factor")
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=read_factor(parameters, "beta_fast", 32.0),
        beta_slow=read_factor(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=attention_factor,
    )


def read_factor(parameters: Json, name: str, default: float = 0.0) -> float:
    """Return a number of a rotary embedding. Raises ModelError if it is not finite and above 0."""
    value = _number(parameters, name, 0.0) or default
    if not 0 < value < math.inf:
        raise ModelError(f"rope's {name} must be given, finite and above 0")
    return value


def _number(parameters: Json, name: str, default: float) -> float:
    """Return a number of a rotary embedding; `default` if it is missing or null."""
    value = parameters.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"rope's {name} must be a number, not {value!r:.80}")
    return float(value)
