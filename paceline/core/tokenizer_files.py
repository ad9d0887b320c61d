"""Ids of single tokens from a tokenizer's file, for readers that tokenize no text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.core.errors import ModelError
from paceline.core.model_folder import read_object

TOKENIZER_FILE = "tokenizer.json"


def token_ids(folder: Path, tokens: Iterable[str]) -> Mapping[str, int]:
    """Return the ids of those of the tokens that are in the vocabulary of a folder's tokenizer.

    Raises ModelError if the file cannot be read.
    """
    path = folder / TOKENIZER_FILE
    content = read_object(path)
    try:
        vocabulary = content.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # pairs of a token and its score
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {str(each["content"]): int(each["id"]) for each in content.get("added_tokens") or ()}
        known = {**vocabulary, **added}
        return {token: int(known[token]) for token in tokens if token in known}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
