"""The reader of modules.json, which lists what follows after a transformer of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.model_folder import read_object
from paceline.core.pooling_config import (
    DenseModule,
    HeadActivation,
    HeadModule,
    NormalizeModule,
    NormModule,
    Pooling,
)
from paceline.core.pooling_files import MODULES_FILE, listed_modules

_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
"""The older form of a Pooling module, in the order in which results are concatenated."""
_MODES: Mapping[str, Pooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_ACTIVATIONS: Mapping[str, HeadActivation] = {
    "Tanh": "tanh",
    "Identity": "none",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules after a transformer."""

    pooling: tuple[Pooling, ...] = ()
    include_prompt: bool = True
    after: tuple[HeadModule, ...] = ()
    """Modules after pooling; without pooling, they are for vectors of tokens."""
    kept_ids: frozenset[int] = frozenset()
    """See `PoolingConfig.kept_ids`."""
    score_tokens: tuple[int, int | None] | None = None


def read_modules(folder: Path) -> Modules:
    """Return the modules that a model's folder lists.

    Raises ModelError if the list is damaged, or has a module that Paceline does not compute.
    """
    listed = listed_modules(folder)
    if not listed or listed[0][0] != "Transformer":
        first = listed[0][0] if listed else "nothing"
        raise ModelError(f"{folder / MODULES_FILE}: the first module must be a Transformer, not {first}")
    pooling: tuple[Pooling, ...] = ()
    include_prompt, kept, scores = True, frozenset[int](), None
    after: list[HeadModule] = []
    for kind, name in listed[1:]:
        values = read_object(folder / name / "config.json")
        place = f"{folder / name}"
        if kind == "Pooling" and not pooling and not after:
            pooling, include_prompt = _pooling(values, place), bool(values.get("include_prompt", True))
        elif kind == "Dense":
            after.append(_dense(values, name, place))
        elif kind == "Normalize":
            after.append(NormalizeModule())
        elif kind == "LayerNorm":
            after.append(NormModule(name, _size(values, "dimension", place)))
        elif kind == "MultiVectorMask":
            kept = _kept_ids(values, place)
        elif kind == "LogitScore" and len(listed) == 2:
            scores = _score_tokens(values, place)
        elif kind != "Dropout":
            raise ModelError(
                f"{folder / MODULES_FILE} lists the module {kind} ({name}), which Paceline does not compute"
            )
    if scores is None and not pooling and not after:
        raise ModelError(f"{folder / MODULES_FILE} lists no module Pooling, so it does not say how to make a vector")
    return Modules(pooling, include_prompt, tuple(after), kept, scores)


def _pooling(values: Mapping[str, Any], place: str) -> tuple[Pooling, ...]:
    mode = values.get("pooling_mode")
    if mode is not None:
        modes = mode if isinstance(mode, list) else [mode]
        unknown = [each for each in modes if not isinstance(each, str) or each not in _MODES]
        if unknown or not modes:
            raise ModelError(f"{place}: pooling_mode must be among {', '.join(_MODES)}, not {mode!r:.80}")
        return tuple(_MODES[each] for each in modes)
    known = [name for name in values if name.startswith("pooling_mode_")]
    if not known:
        raise ModelError(f"{place}/config.json lacks pooling_mode, so it does not say how to make a vector")
    if unknown := [name for name in known if name not in _FLAGS and values[name]]:
        raise ModelError(f"{place}: {unknown[0]} is not supported")
    return tuple(kind for name, kind in _FLAGS.items() if values.get(name)) or ("mean",)


def _dense(values: Mapping[str, Any], name: str, place: str) -> DenseModule:
    path = values.get("activation_function", "torch.nn.modules.activation.Tanh")
    last = str(path).rpartition(".")[2]
    if not str(path).startswith("torch.nn.") or last not in _ACTIVATIONS:
        raise ModelError(f"{place}: activation_function {path!r:.80} is not supported; supported are: torch.nn's "
                         f"{', '.join(_ACTIVATIONS)}")  # fmt: skip
    return DenseModule(
        name,
        _size(values, "in_features", place),
        _size(values, "out_features", place),
        bool(values.get("bias", True)),
        _ACTIVATIONS[last],
        bool(values.get("use_residual", False)),
    )


def _kept_ids(values: Mapping[str, Any], place: str) -> frozenset[int]:
    """Return the only token ids whose vectors a document has; empty if it has all."""
    if values.get("skiplist_words"):
        raise ModelError(f"{place}: skiplist_words, words that have no vectors, are not supported")
    return frozenset(map(int, values.get("keep_only_token_ids") or ()))


def _score_tokens(values: Mapping[str, Any], place: str) -> tuple[int, int | None]:
    found = [values.get(name) for name in ("true_token_id", "false_token_id")]
    if not isinstance(found[0], int) or not isinstance(found[1], int | None):
        raise ModelError(f"{place}/config.json must have true_token_id, the token whose logit is the score")
    return found[0], found[1]


def _size(values: Mapping[str, Any], name: str, place: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 20:
        raise ModelError(f"{place}/config.json: {name} must be a positive whole number, not {value!r:.80}")
    return value
