"""The reader of modules.json, which lists what follows after a transformer of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.model_folder import read_object
from paceline.core.pooling import PoolRole
from paceline.core.pooling_colbert import skipped_ids
from paceline.core.pooling_config import (
    DenseModule,
    HeadActivation,
    HeadModule,
    NormalizeModule,
    NormModule,
    Pooling,
    SpladeHead,
)
from paceline.core.pooling_files import MODULES_FILE, TEXT_FILES, listed_modules

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
    skipped_ids: frozenset[int] = frozenset()
    skipping_roles: frozenset[PoolRole] = frozenset({"document"})
    splade: SpladeHead | None = None
    is_static: bool = False
    """Whether a table of the vectors of tokens takes the place of a transformer."""
    score_tokens: tuple[int, int | None] | None = None


def read_modules(folder: Path) -> Modules:
    """Return the modules that a model's folder lists.

    Raises ModelError if the list is damaged, or has a module that Paceline does not compute.
    """
    (first, place), *rest = listed_modules(folder) or [("nothing", "")]
    if first not in _FIRST:
        message = f"the first module must be among {', '.join(_FIRST)}, not {first}"
        raise ModelError(f"{folder / MODULES_FILE}: {message}")
    found = Modules()
    if first == "StaticEmbedding":
        if place not in ("", "."):
            raise ModelError(
                f"{folder}: the table of StaticEmbedding and its tokenizer are in the folder {place}; Paceline reads "
                "them from the model's own folder, beside a config.json with the model_type model2vec"
            )
        found = Modules(pooling=("mean",), is_static=True)
    for kind, name in rest:
        found = _with_module(found, folder, kind, name, is_only=len(rest) == 1)
    if found.splade is not None and first != "MLMTransformer" and not _makes_logits(folder / place):
        raise ModelError(f"{folder / place}: SpladePooling needs logits, and the first module does not make them "
                         "(transformer_task fill-mask)")  # fmt: skip
    if not (found.pooling or found.after or found.splade or found.score_tokens):
        raise ModelError(f"{folder / MODULES_FILE} lists no module Pooling, so it does not say how to make a vector")
    return found


_FIRST = ("Transformer", "MLMTransformer", "StaticEmbedding")


def _with_module(found: Modules, folder: Path, kind: str, name: str, is_only: bool) -> Modules:
    """Return the modules with one more.

    Args:
        is_only: whether it is the only one after the first.
    """
    values, place = read_object(folder / name / "config.json"), f"{folder / name}"
    is_first = not (found.pooling or found.after)
    if kind == "Pooling" and is_first:
        includes = bool(values.get("include_prompt", True))
        return replace(found, pooling=_pooling(values, place), include_prompt=includes)
    if kind == "Dense":
        return replace(found, after=(*found.after, _dense(values, name, place)))
    if kind == "Normalize":
        return replace(found, after=(*found.after, NormalizeModule()))
    if kind == "LayerNorm":
        return replace(found, after=(*found.after, NormModule(name, _size(values, "dimension", place))))
    if kind == "MultiVectorMask":
        skipped, roles = skipped_ids(folder, values.get("skiplist_words") or ()), _roles(values, place)
        return replace(found, kept_ids=_kept_ids(values), skipped_ids=skipped, skipping_roles=roles)
    if kind == "LogitScore" and is_only:
        return replace(found, score_tokens=_score_tokens(values, place))
    if kind == "SpladePooling" and is_only:
        return replace(found, splade=_splade(values, place))
    if kind == "Dropout":
        return found
    raise ModelError(f"{folder / MODULES_FILE} lists the module {kind} ({name}), which Paceline does not compute")


def _makes_logits(place: Path) -> bool:
    return any(read_object(place / file).get("transformer_task") == "fill-mask" for file in TEXT_FILES)


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


def _kept_ids(values: Mapping[str, Any]) -> frozenset[int]:
    """Return the only token ids whose vectors a document has; empty if it has all."""
    return frozenset(map(int, values.get("keep_only_token_ids") or ()))


def _roles(values: Mapping[str, Any], place: str) -> frozenset[PoolRole]:
    """Return the inputs in which words of the skip list have no vectors."""
    names = values.get("skiplist_tasks")
    names = ["document"] if names is None else [names] if isinstance(names, str) else names
    roles: frozenset[PoolRole] = frozenset(role for role in _ROLES if role in names)
    if len(roles) < len(set(names)):
        raise ModelError(f"{place}: skiplist_tasks must be among {', '.join(_ROLES)}, not {names!r:.80}")
    return roles


_ROLES: tuple[PoolRole, ...] = ("query", "document")


def _splade(values: Mapping[str, Any], place: str) -> SpladeHead:
    pooling, activation = values.get("pooling_strategy", "max"), values.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelError(
            f"{place}: pooling_strategy must be max or sum, not {pooling!r:.40}, and activation_function relu or "
            f"log1p_relu, not {activation!r:.40}"
        )
    return SpladeHead(pooling, 2 if activation == "log1p_relu" else 1)


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
