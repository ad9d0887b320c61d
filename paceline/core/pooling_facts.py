"""Single facts that config.json and the files beside it say of a model that pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.pooling_files import SETTINGS_FILE
from paceline.core.pooling_labels import whole
from paceline.core.pooling_retrievers import attention_contract

STATIC = "model2vec"
"""The model type of a table of the vectors of tokens, without a transformer."""
ENCODER_TYPES = {
    "bert": 0,
    "roberta": 1,
    "xlm-roberta": 1,
    "camembert": 1,
    "distilbert": 0,
    "electra": 0,
    "mpnet": 1,
    "modernbert": 0,
    "nomic_bert": 0,
    "gte": 0,
    "new": 0,
    STATIC: 0,
}
"""The model types of encoders, and whether positions begin after the id of the padding token."""
STATIC_TOKENS = 1 << 15
"""Largest number of tokens of a text for a table of vectors, which has no limit of its own."""
_MOST = 1 << 40


def _text_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text model, and those of the models around it that it does not have."""
    for name in ("vlm_config", "text_config"):
        nested = raw.get(name)
        raw = {**raw, **nested} if isinstance(nested, Mapping) else raw
    return raw


def hidden_size(raw: Mapping[str, Any]) -> int:
    own = _text_fields(raw)
    names = ("hidden_size", "n_embd", "dim", "hidden_dim")
    return whole(next((own[name] for name in names if own.get(name) is not None), None), "hidden_size")


def max_tokens(raw: Mapping[str, Any], text: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    """Return the largest number of tokens: the least of what the model, its tokenizer and its authors allow."""
    own = _text_fields(raw)
    most = own.get("max_position_embeddings", own.get("n_positions"))
    limits = [_MOST]
    if most is not None:
        skipped = 0
        if ENCODER_TYPES.get(str(raw.get("model_type"))):
            skipped = _index(own.get("pad_token_id", 1), "pad_token_id") + 1
        limits.append(whole(most, "max_position_embeddings") - skipped)
    for value in (text.get("max_seq_length"), tokenizer.get("model_max_length")):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST:
            limits.append(int(value))  # tokenizers without a limit have a very large number
    if raw.get("model_type") == STATIC:
        limits.append(STATIC_TOKENS)
    least = min(limits)
    if least < 1 or least == _MOST:
        raise ModelError("no file says how many tokens an input may have (max_position_embeddings)")
    return least


def is_bidirectional(raw: Mapping[str, Any], architecture: str) -> bool:
    if architecture == "ColPaliForRetrieval":
        return True
    if architecture == "ColQwen3_5":
        return attention_contract(raw) == "bidirectional"
    own = _text_fields(raw)
    return own.get("use_bidirectional_attention") in (True, "all") or own.get("is_causal") is False


def prompts(settings: Mapping[str, Any]) -> Mapping[str, str]:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, Mapping):
        raise ModelError(f"{SETTINGS_FILE}: prompts must be an object")
    return {str(name): "" if text is None else str(text) for name, text in prompts.items()}


def matryoshka(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, ...]:
    found = raw.get("matryoshka_dimensions") or settings.get("matryoshka_dimensions") or []
    if not isinstance(found, list):
        raise ModelError("matryoshka_dimensions must be a list of whole numbers")
    return tuple(sorted({whole(size, "matryoshka_dimensions") for size in found}))


def special_ids(raw: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids of special tokens without a sparse weight: the ends of a text, padding and unknown tokens."""
    named = [raw.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
    # XLM-R's unknown token is always 3; its config does not say so.
    return frozenset(3 if each is None else _index(each, "token ids") for each in (*named, 3))


def _index(value: object, name: str) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else whole(value, name)
