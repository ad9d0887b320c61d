"""The reader of what a checkpoint says about pooling: the files of sentence-transformers, and heads in config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, ModelError
from paceline.core.model_folder import read_object
from paceline.core.pooling import PoolTask
from paceline.core.pooling_choice import PoolingChoice
from paceline.core.pooling_config import HeadModule, NormalizeModule, Pooling, PoolingConfig, ScoreActivation
from paceline.core.pooling_files import BGE_M3_FILES, MODULES_FILE, SETTINGS_FILE, TEXT_FILES
from paceline.core.pooling_modules import Modules, read_modules

ENCODER_TYPES = {
    "bert": 0,
    "roberta": 1,
    "xlm-roberta": 1,
    "camembert": 1,
    "modernbert": 0,
    "nomic_bert": 0,
    "gte": 0,
    "new": 0,
}
"""The model types of encoders, and whether positions begin after the id of the padding token."""
_MOST = 1 << 40
_SEQUENCE, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_REWARD, _STEPS = "ForRewardModel", "ForProcessRewardModel"
"""Ends of the names of decoders with a head for the reward of a whole text, or of each step in it. A step's reward is
that of the token after it, which marks its end.
"""


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
    has_head = architecture.endswith((_SEQUENCE, _TOKENS, _REWARD, _STEPS))
    modules = read_modules(folder) if (folder / MODULES_FILE).is_file() else None
    if choice is not None and (modules is not None or has_head or is_encoder):
        raise ConfigError(f"--convert embed: {folder} says itself how it pools, so leave the option out")
    if modules is None and not has_head and choice is None:
        if is_encoder:
            raise ModelError(
                f"{folder} lacks {MODULES_FILE}, which says how an encoder's hidden states become a vector (the mean, "
                "the first token); take the model from sentence-transformers, or add the file"
            )
        return None
    settings, text = read_object(folder / SETTINGS_FILE), _text_settings(folder)
    try:
        hidden = _hidden_size(raw)
        shared = {
            "architecture": architecture,
            "is_encoder": is_encoder,
            "hidden_size": hidden,
            "max_tokens": _max_tokens(raw, text, read_object(folder / "tokenizer_config.json")),
            "attention": "full" if is_encoder or _is_bidirectional(raw) else "causal",
            "prompts": _prompts(settings),
            "default_prompt_name": settings.get("default_prompt_name"),
            "lower_case": bool(text.get("do_lower_case", False)),
        }
        if has_head:
            return _with_labels(raw, architecture, shared)
        if choice is not None:
            return _with_choice(choice, shared)
        assert modules is not None
        return _with_modules(folder, raw, modules, settings, shared)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def _with_labels(raw: Mapping[str, Any], architecture: str, shared: Mapping[str, Any]) -> PoolingConfig:
    """Return the config of a model whose head gives a number for each label."""
    if architecture.endswith(_REWARD):
        raw = {"num_labels": 1, "problem_type": "regression", **raw}
    labels = _labels(raw)
    if architecture.endswith((_TOKENS, _STEPS)):
        return PoolingConfig(
            **shared, tasks=frozenset({"token_classify"}), dim=len(labels), labels=labels, activation="softmax"
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
        activation=_activation(raw, len(labels)),
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


def _with_modules(
    folder: Path, raw: Mapping[str, Any], modules: Modules, settings: Mapping[str, Any], shared: Mapping[str, Any]
) -> PoolingConfig:
    """Return the config of a model of sentence-transformers."""
    hidden = shared["hidden_size"]
    if modules.score_tokens is not None:
        tasks: frozenset[PoolTask] = frozenset({"score"})
        return PoolingConfig(**shared, tasks=tasks, dim=1, pooling=("last",), score_tokens=modules.score_tokens,
                             activation=_named_activation(settings.get("activation_fn")) or "sigmoid")  # fmt: skip
    if not modules.pooling:
        size = _size_after(modules.after, hidden)
        return PoolingConfig(**shared, tasks=frozenset({"token_embed"}), dim=size, token_modules=modules.after,
                             kept_ids=modules.kept_ids, similarity=_similarity(settings, "maxsim"))  # fmt: skip
    tasks = frozenset({"embed", "token_embed"})
    dense = all((folder / name).is_file() for name in BGE_M3_FILES)
    if dense:
        tasks |= {"sparse"}
    return PoolingConfig(
        **shared,
        tasks=tasks,
        dim=_size_after(modules.after, hidden * len(modules.pooling)),
        pooling=modules.pooling,
        include_prompt=modules.include_prompt,
        modules=modules.after,
        similarity=_similarity(settings, "cosine"),
        matryoshka_dimensions=_matryoshka(raw, settings),
        any_dimensions=bool(raw.get("is_matryoshka")),
        dense_tokens=dense,
        keeps_first_token=not dense,
        unweighted_ids=_special_ids(raw) if dense else frozenset(),
    )


def _size_after(modules: Sequence[HeadModule], size: int) -> int:
    """Return the size of vectors after all modules. Raises ModelError if one of them takes another size."""
    for module in modules:
        own = getattr(module, "size_in", getattr(module, "size", size))
        if own != size:
            raise ModelError(f"{getattr(module, 'folder', 'a module')} takes vectors of {own} elements, not {size}")
        size = getattr(module, "size_out", size)
    return size


def _hidden_size(raw: Mapping[str, Any]) -> int:
    nested = raw.get("text_config")
    own = raw if not isinstance(nested, Mapping) else {**raw, **nested}
    return _whole(own.get("hidden_size", own.get("n_embd")), "hidden_size")


def _max_tokens(raw: Mapping[str, Any], text: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    """Return the largest number of tokens: the least of what the model, its tokenizer and its authors allow."""
    nested = raw.get("text_config")
    own = raw if not isinstance(nested, Mapping) else {**raw, **nested}
    most = own.get("max_position_embeddings", own.get("n_positions"))
    limits = [_MOST]
    if most is not None:
        skipped = 0
        if ENCODER_TYPES.get(str(raw.get("model_type"))):
            skipped = _index(own.get("pad_token_id", 1), "pad_token_id") + 1
        limits.append(_whole(most, "max_position_embeddings") - skipped)
    for value in (text.get("max_seq_length"), tokenizer.get("model_max_length")):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST:
            limits.append(int(value))  # tokenizers without a limit have a very large number
    least = min(limits)
    if least < 1 or least == _MOST:
        raise ModelError("no file says how many tokens an input may have (max_position_embeddings)")
    return least


def _is_bidirectional(raw: Mapping[str, Any]) -> bool:
    nested = raw.get("text_config")
    own = raw if not isinstance(nested, Mapping) else {**raw, **nested}
    return own.get("use_bidirectional_attention") in (True, "all") or own.get("is_causal") is False


def _prompts(settings: Mapping[str, Any]) -> Mapping[str, str]:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, Mapping):
        raise ModelError(f"{SETTINGS_FILE}: prompts must be an object")
    return {str(name): "" if text is None else str(text) for name, text in prompts.items()}


def _similarity(settings: Mapping[str, Any], default: str) -> str:
    return str(settings.get("similarity_fn_name") or default)


def _matryoshka(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, ...]:
    found = raw.get("matryoshka_dimensions") or settings.get("matryoshka_dimensions") or []
    if not isinstance(found, list):
        raise ModelError("matryoshka_dimensions must be a list of whole numbers")
    return tuple(sorted({_whole(size, "matryoshka_dimensions") for size in found}))


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of labels in order. Without any, there are two, as in transformers."""
    names = raw.get("id2label")
    if isinstance(names, Mapping) and names:
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except ValueError:
            raise ModelError("the keys of id2label must be whole numbers") from None
    count = _whole(raw.get("num_labels", 2), "num_labels")
    return tuple(f"LABEL_{index}" for index in range(count))


def _activation(raw: Mapping[str, Any], labels: int) -> ScoreActivation:
    """Return what makes probabilities of a sequence's labels."""
    by_problem: Mapping[str, ScoreActivation] = {
        "regression": "none",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    problem = str(raw.get("problem_type"))
    if problem in by_problem:
        return by_problem[problem]
    own = raw.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = _named_activation(name or raw.get("sbert_ce_default_activation_function"))
    return named or ("sigmoid" if labels == 1 else "softmax")


def _named_activation(name: object) -> ScoreActivation | None:
    """Return the activation that a class of torch names; None if there is no name."""
    known: Mapping[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
    if name is None:
        return None
    if not str(name).startswith("torch.") or (last := str(name).rpartition(".")[2]) not in known:
        raise ModelError(
            f"the activation {name!r:.80} of the scores is not supported; supported are: {', '.join(known)}"
        )
    return known[last]


def _special_ids(raw: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids of special tokens without a sparse weight: the ends of a text, padding and unknown tokens."""
    named = [raw.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
    # XLM-R's unknown token is always 3; its config does not say so.
    return frozenset(3 if each is None else _index(each, "token ids") for each in (*named, 3))


def _text_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the first module. Raises ModelError if they change texts in a way that is not known."""
    found = next((found for name in TEXT_FILES if (found := read_object(folder / name))), {})
    for name in ("query_expansion", "query_length", "document_length"):
        if found.get(name) is not None:
            raise ModelError(f"{folder}: {name} of sentence-transformers is not supported")
    return found


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise ModelError(f"{name} must be a positive whole number, not {value!r:.80}")
    return value


def _index(value: object, name: str) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else _whole(value, name)
