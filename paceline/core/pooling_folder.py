"""The reader of what a checkpoint says about pooling: the files of sentence-transformers, and heads in config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, ModelError
from paceline.core.model_folder import read_object
from paceline.core.pooling import PoolTask
from paceline.core.pooling_choice import PoolingChoice
from paceline.core.pooling_colbert import STANFORD, read_colbert
from paceline.core.pooling_config import HeadModule, NormalizeModule, Pooling, PoolingConfig
from paceline.core.pooling_facts import (
    ENCODER_TYPES,
    STATIC,
    hidden_size,
    is_bidirectional,
    matryoshka,
    max_tokens,
    prompts,
    special_ids,
)
from paceline.core.pooling_files import BGE_M3_FILES, MODULES_FILE, SETTINGS_FILE, TEXT_FILES
from paceline.core.pooling_labels import label_activation, named_activation, read_labels, whole
from paceline.core.pooling_modules import Modules, read_modules
from paceline.core.pooling_retrievers import RETRIEVERS, read_retriever
from paceline.core.tokenizer_files import TOKENIZER_FILE, token_ids

_SEQUENCE, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_REWARD, _STEPS = "ForRewardModel", "ForProcessRewardModel"
"""Ends of the names of decoders with a head for the reward of a whole text, or of each step in it. A step's reward is
that of the token after it, which marks its end.
"""
_STEP_TAG = "<extra_0>"
"""The token that marks the end of a step."""


def read_pooling_config(folder: Path, choice: PoolingChoice | None = None) -> PoolingConfig | None:
    """Return how the model in a folder pools; None if it is a causal model without any files about pooling.

    Args:
        choice: how such a causal model pools nevertheless, as an operator says.

    Raises:
        ModelError: a file is damaged, asks for what Paceline does not compute, or does not say how to pool.
        ConfigError: there is a choice, but the folder says itself how the model pools.
    """
    raw = read_object(folder / "config.json")
    names = raw.get("architectures") or [""]
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    is_encoder = str(raw.get("model_type")) in ENCODER_TYPES
    modules = read_modules(folder) if (folder / MODULES_FILE).is_file() else None
    is_own = architecture == STANFORD or architecture in RETRIEVERS or raw.get("model_type") == STATIC
    # Checkpoints that were converted to a head for labels may keep the field.
    is_causal = architecture.endswith("ForCausalLM") or bool(raw.get("is_original_qwen3_reranker"))
    answers = _CLASSIFIER in raw and is_causal and modules is None
    has_head = architecture.endswith((_SEQUENCE, _TOKENS, _REWARD, _STEPS)) or answers
    if choice is not None and (modules is not None or has_head or is_encoder or is_own):
        raise ConfigError(f"--convert {choice.task}: {folder} says itself how it pools, so leave the option out")
    if modules is None and not has_head and not is_own and choice is None:
        if is_encoder:
            raise ModelError(
                f"{folder} lacks {MODULES_FILE}, which says how an encoder's hidden states become a vector (the mean, "
                "the first token); take the model from sentence-transformers, or add the file"
            )
        return None
    try:
        shared = _shared(folder, raw, architecture, is_encoder)
        if answers or (choice is not None and choice.task == "score"):
            return _with_answers(folder, raw, shared)
        if has_head:
            return _with_labels(folder, raw, architecture, shared)
        if choice is not None:
            return _with_choice(choice, shared)
        if architecture in RETRIEVERS:
            return _with_images(folder, raw, architecture, shared)
        is_static = raw.get("model_type") == STATIC
        own = modules or Modules(pooling=("mean",) if is_static else (), is_static=is_static)
        return _with_modules(folder, raw, own, shared)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


_CLASSIFIER = "classifier_from_token"
"""Field of config.json with the tokens for no and yes, whose logits make the score of a causal model."""


def _shared(folder: Path, raw: Mapping[str, Any], architecture: str, is_encoder: bool) -> dict[str, Any]:
    """Return the fields that all kinds of models have."""
    settings, text = read_object(folder / SETTINGS_FILE), _text_settings(folder)
    is_full = is_encoder or is_bidirectional(raw, architecture)
    return {
        "architecture": architecture,
        "is_encoder": is_encoder,
        "hidden_size": hidden_size(raw),
        "max_tokens": max_tokens(raw, text, read_object(folder / "tokenizer_config.json")),
        "attention": "full" if is_full else "causal",
        "prompts": prompts(settings),
        "default_prompt_name": settings.get("default_prompt_name"),
        "lower_case": bool(text.get("do_lower_case", False)),
    }


def _with_answers(folder: Path, raw: Mapping[str, Any], shared: Mapping[str, Any]) -> PoolingConfig:
    """Return the config of a causal model whose score is the logit of yes, less that of no."""
    named = raw.get(_CLASSIFIER, ["no", "yes"])
    if not isinstance(named, list) or len(named) != 2 or not all(isinstance(each, str) for each in named):
        raise ModelError(f"{_CLASSIFIER} must be the tokens for no and yes, not {named!r:.80}")
    known = token_ids(folder, named)
    if missing := [each for each in named if each not in known]:
        raise ModelError(f"the tokenizer has no token {missing[0]!r:.80}, from whose logit the score is computed")
    ids = known[named[1]], known[named[0]]
    tasks: frozenset[PoolTask] = frozenset({"score"})
    return PoolingConfig(
        **shared,
        tasks=tasks,
        generates=shared["attention"] == "causal" and _CLASSIFIER not in raw,
        dim=1,
        pooling=("last",),
        score_tokens=ids,
        activation="sigmoid",
    )


def _with_images(folder: Path, raw: Mapping[str, Any], architecture: str, shared: Mapping[str, Any]) -> PoolingConfig:
    """Return the config of a model that retrieves pages by their images."""
    own = read_retriever(folder, raw, architecture, shared["hidden_size"])
    tasks: frozenset[PoolTask] = frozenset({"token_embed"})
    return PoolingConfig(
        **{**shared, "prompts": {**own.prompts, **shared["prompts"]}},
        tasks=tasks,
        dim=_size_after(own.modules, shared["hidden_size"]),
        token_modules=own.modules,
        query_suffix=own.query_suffix,
        image_prompt=own.image_prompt,
        special_tokens=own.special_tokens,
        similarity="maxsim",
    )


def _with_labels(folder: Path, raw: Mapping[str, Any], architecture: str, shared: Mapping[str, Any]) -> PoolingConfig:
    """Return the config of a model whose head gives a number for each label."""
    if architecture.endswith(_REWARD):
        raw = {"num_labels": 1, "problem_type": "regression", **raw}
    labels = read_labels(raw)
    if architecture.endswith((_TOKENS, _STEPS)):
        steps = token_ids(folder, (_STEP_TAG,)) if architecture.endswith(_STEPS) else {}
        return PoolingConfig(
            **shared,
            tasks=frozenset({"token_classify"}),
            dim=len(labels),
            labels=labels,
            activation="softmax",
            kept_ids=frozenset(steps.values()),
        )
    tasks: set[PoolTask] = {"classify", "score"} if len(labels) == 1 else {"classify"}
    named = raw.get("classifier_pooling")
    if named not in (None, "cls", "mean"):
        raise ModelError(f"classifier_pooling must be cls or mean, not {named!r:.80}")
    pooled: Pooling = "mean" if named == "mean" else "cls" if shared["is_encoder"] else "last"
    return PoolingConfig(
        **shared,
        tasks=frozenset(tasks),
        dim=len(labels),
        pooling=(pooled,),
        labels=labels,
        activation=label_activation(raw, len(labels)),
    )


def _with_choice(choice: PoolingChoice, shared: Mapping[str, Any]) -> PoolingConfig:
    """Return the config of a causal model that pools as an operator says."""
    return PoolingConfig(
        **shared,
        tasks=frozenset({"embed", "token_embed"}),
        generates=shared["attention"] == "causal",
        dim=shared["hidden_size"],
        pooling=(choice.pooling,),
        modules=(NormalizeModule(),) if choice.normalize else (),
    )


def _with_modules(folder: Path, raw: Mapping[str, Any], modules: Modules, shared: Mapping[str, Any]) -> PoolingConfig:
    """Return the config of a model of sentence-transformers, PyLate, ColBERT or model2vec."""
    settings, hidden = read_object(folder / SETTINGS_FILE), shared["hidden_size"]
    tasks: frozenset[PoolTask]
    if modules.score_tokens is not None:
        tasks = frozenset({"score"})
        return PoolingConfig(**shared, tasks=tasks, dim=1, pooling=("last",), score_tokens=modules.score_tokens,
                             activation=named_activation(settings.get("activation_fn")) or "sigmoid")  # fmt: skip
    if modules.splade is not None:
        tasks, size = frozenset({"sparse"}), whole(raw.get("vocab_size"), "vocab_size")
        return PoolingConfig(**shared, tasks=tasks, dim=size, splade=modules.splade,
                             similarity=_similarity(settings, "dot"))  # fmt: skip
    if not modules.pooling:
        return _with_tokens(folder, raw, modules, settings, shared)
    is_static = raw.get("model_type") == STATIC
    if is_static != modules.is_static:
        raise ModelError(f"{MODULES_FILE} and the model_type of config.json disagree on whether the model is a table")
    tasks = frozenset({"embed"} if is_static else {"embed", "token_embed"})
    dense = all((folder / name).is_file() for name in BGE_M3_FILES)
    if dense:
        tasks |= {"sparse"}
    after = modules.after
    if is_static and not (folder / MODULES_FILE).is_file() and raw.get("normalize", True):
        after = (NormalizeModule(),)
    return PoolingConfig(
        **shared,
        tasks=tasks,
        dim=_size_after(after, hidden * len(modules.pooling)),
        pooling=modules.pooling,
        include_prompt=modules.include_prompt,
        modules=after,
        similarity=_similarity(settings, "cosine"),
        matryoshka_dimensions=matryoshka(raw, settings),
        any_dimensions=bool(raw.get("is_matryoshka")),
        is_static=is_static,
        special_tokens=not is_static,
        dropped_ids=_unknown_ids(folder) if is_static and not (folder / MODULES_FILE).is_file() else frozenset(),
        dense_tokens=dense,
        keeps_first_token=not dense,
        unweighted_ids=special_ids(raw) if dense else frozenset(),
    )


def _unknown_ids(folder: Path) -> frozenset[int]:
    """Return the id of the token for unknown words, which model2vec leaves out, unlike sentence-transformers."""
    unknown = (read_object(folder / TOKENIZER_FILE).get("model") or {}).get("unk_token")
    return frozenset(token_ids(folder, (unknown,)).values()) if isinstance(unknown, str) else frozenset()


def _with_tokens(
    folder: Path, raw: Mapping[str, Any], modules: Modules, settings: Mapping[str, Any], shared: Mapping[str, Any]
) -> PoolingConfig:
    """Return the config of a model that only gives vectors of tokens."""
    own = read_colbert(folder, raw, settings, _text_settings(folder))
    after = (*modules.after, *own.modules)
    tasks: frozenset[PoolTask] = frozenset({"token_embed"})
    expansion, lengths = own.expansion, dict(own.lengths)
    if expansion is not None and expansion.length > shared["max_tokens"]:
        raise ModelError(
            f"queries are expanded to {expansion.length} tokens, and the model takes {shared['max_tokens']}"
        )
    if expansion is not None and expansion.is_limit:
        lengths["query"] = expansion.length
    return PoolingConfig(
        **{**shared, "prompts": {**shared["prompts"], **own.prompts}},
        tasks=tasks,
        dim=_size_after(after, shared["hidden_size"]),
        token_modules=after,
        kept_ids=modules.kept_ids,
        skipped_ids=modules.skipped_ids if own.skipped_ids is None else own.skipped_ids,
        skipping_roles=modules.skipping_roles,
        expansion=expansion,
        marker_ids=own.marker_ids,
        lengths=lengths,
        similarity=_similarity(settings, "maxsim"),
    )


def _size_after(modules: Sequence[HeadModule], size: int) -> int:
    """Return the size of vectors after all modules. Raises ModelError if one of them takes another size."""
    for module in modules:
        own = getattr(module, "size_in", getattr(module, "size", size))
        if own != size:
            raise ModelError(f"{getattr(module, 'folder', 'a module')} takes vectors of {own} elements, not {size}")
        size = getattr(module, "size_out", size)
    return size


def _similarity(settings: Mapping[str, Any], default: str) -> str:
    return str(settings.get("similarity_fn_name") or default)


def _text_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the first module."""
    return next((found for name in TEXT_FILES if (found := read_object(folder / name))), {})
