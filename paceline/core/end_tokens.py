"""The tokens with which a model ends an answer, as gateways and workers read them from its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.model_folder import read_object


def special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a map from names of special tokens, such as "eos_token", to their texts in this model.

    Args:
        settings: the content of tokenizer_config.json, which has precedence over special_tokens_map.json.
    """
    found = {}
    for name, value in {**read_object(folder / "special_tokens_map.json"), **settings}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def text_value(config: Mapping[str, Any], name: str) -> Any:
    """Return a value of config.json; None if it is missing. Multimodal models have the values of the language model in
    `text_config`.
    """
    value = config.get(name)
    return value if value is not None else (config.get("text_config") or {}).get(name)


def end_token_ids(
    generation: Mapping[str, Any], model: Mapping[str, Any], tokenizer_end: int | None, vocab_size: int
) -> frozenset[int]:
    """Return the ids of the tokens that end an answer.

    Args:
        generation: the content of generation_config.json.
        model: the content of config.json.
        tokenizer_end: id of the tokenizer's `eos_token`; None if it has none.
        vocab_size: number of tokens that the model knows. Ids from this number on are left out.

    Raises:
        ModelError: a file has a value that is not an id.
    """
    file, listed = "generation_config.json", generation.get("eos_token_id")
    if listed is None:
        file, listed = "config.json", text_value(model, "eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ModelError(f"{file}: eos_token_id must be a token id or a list of them, not {listed!r}")
    # A chat model's config may still name the base model's end of text; its tokenizer knows the end of a turn.
    ids = ids if tokenizer_end is None else [*ids, tokenizer_end]
    # A model cannot choose an id outside of its vocabulary, such as the -1 of some configs.
    return frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)


_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def read_end_token_ids(folder: Path, tokenizer: str) -> frozenset[int]:
    """Return the ids of the tokens that end an answer, without reading the whole tokenizer, which is megabytes of text.

    Args:
        tokenizer: the content of tokenizer.json.

    Raises:
        ModelError: a file of the folder cannot be read.
    """
    name = special_tokens(folder, read_object(folder / "tokenizer_config.json")).get("eos_token", "")
    tokenizer_end = None
    if (match := _ADDED_TOKENS.search(tokenizer)) is not None:
        try:
            added, _ = json.JSONDecoder().raw_decode(tokenizer, match.end())
            tokenizer_end = next((token["id"] for token in added if token["content"] == name), None)
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{folder / 'tokenizer.json'}: its added tokens cannot be read: {error}") from error
    generation, model = read_object(folder / "generation_config.json"), read_object(folder / "config.json")
    size = text_value(model, "vocab_size")
    return end_token_ids(generation, model, tokenizer_end, size if isinstance(size, int) else 1 << 32)
