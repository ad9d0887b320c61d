"""Tokenizers in which no text of a client spells a token that belongs to media."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

Json = dict[str, Any]


class ReservedTokens:
    """A tokenizer whose reserved tokens have unguessable texts.

    So a prompt with media is tokenized as one text, as in the model's training: many tokenizers treat the beginning of
    a text in another way than the rest. What a client writes like a reserved token is ordinary text.

    Args:
        file: the model's tokenizer.json.
        names: the model's own texts of the reserved tokens, by id.
    """

    def __init__(self, file: Path, names: Mapping[int, str]) -> None:
        self.texts = {token_id: f"reserved{secrets.token_hex(16)}" for token_id in names}
        """The texts that stand for the reserved tokens in this tokenizer, by id."""
        document: Json = json.loads(file.read_text(encoding="utf-8"))
        renamed = {name: self.texts[token_id] for token_id, name in names.items()}
        added: list[Json] = document.get("added_tokens") or []
        for token in added:
            token["content"] = renamed.get(token["content"], token["content"])
        known = {token["id"] for token in added}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added += [{"id": own, "content": text, **plain} for own, text in self.texts.items() if own not in known]
        document["added_tokens"] = sorted(added, key=lambda token: token["id"])
        _rename(document["model"], renamed)
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document, ensure_ascii=False))


def _rename(model: Json, renamed: Mapping[str, str]) -> None:
    """Rename tokens in the vocabulary. No merge makes one of them any more."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        for name, text in renamed.items():
            if name in vocabulary:
                vocabulary[text] = vocabulary.pop(name)
    else:
        model["vocab"] = [[renamed.get(name, name), score] for name, score in vocabulary]
    if "merges" in model:
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in map(list, pairs) if not {"".join(pair), *pair} & renamed.keys()]
