"""The reader of what ColBERT models say of queries and documents: markers, query expansion, tokens without vectors.

Three forms: the first module of sentence-transformers, the settings of PyLate up to version 3, and the
artifact.metadata of Stanford's ColBERT.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.end_tokens import special_tokens
from paceline.core.errors import ModelError
from paceline.core.model_folder import read_object
from paceline.core.pooling import PoolRole
from paceline.core.pooling_config import DenseModule, HeadModule, NormalizeModule, QueryExpansion
from paceline.core.pooling_files import COLBERT_FILE
from paceline.core.tokenizer_files import token_ids

STANFORD = "HF_ColBERT"
"""The architecture that Stanford's ColBERT names in config.json."""
_PYLATE = (
    *("query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
    *("query_prefix", "document_prefix", "skiplist_words", "query_expansion"),
)
"""Settings of which any one says that PyLate wrote the folder."""
_LENGTH = 32
"""Number of tokens of a query in ColBERT, if a folder does not say another one."""


@dataclass(frozen=True, slots=True)
class ColbertSettings:
    """What a folder says of queries and documents. See the fields of the same names of `PoolingConfig`."""

    expansion: QueryExpansion | None = None
    marker_ids: Mapping[PoolRole, int] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts of queries and documents, in place of those that the folder names otherwise."""
    lengths: Mapping[PoolRole, int] = field(default_factory=dict)
    skipped_ids: frozenset[int] | None = None
    """None if it is the module MultiVectorMask that says it."""
    modules: tuple[HeadModule, ...] = ()
    """What follows for vectors of tokens, if no module says it."""


def read_colbert(
    folder: Path, raw: Mapping[str, Any], settings: Mapping[str, Any], text: Mapping[str, Any]
) -> ColbertSettings:
    """Return what a folder says of queries and documents.

    Args:
        raw: the values of config.json.
        settings: the settings of sentence-transformers or PyLate.
        text: the settings of the first module.

    Raises ModelError if a file is damaged, or names a token that the tokenizer does not have.
    """
    if STANFORD in (raw.get("architectures") or ()):
        return _stanford(folder, read_object(folder / COLBERT_FILE), raw)
    own = {name: value for name, value in settings.items() if name in _PYLATE}
    if not own:
        return ColbertSettings(
            _expansion(folder, text.get("query_expansion")),
            lengths=_lengths(text.get("query_length"), text.get("document_length")),
        )
    expansion: object = own.get("query_expansion")
    if "query_expansion" not in own and own.get("do_query_expansion") is not False:
        attends = own.get("attend_to_expansion_tokens", own.get("attend_to_mask_tokens"))
        expansion = {"strategy": "fixed", "attend": bool(attends), "length": own.get("query_length") or _LENGTH}
    prefixes = {"query": own.get("query_prefix"), "document": own.get("document_prefix")}
    markers, prompts = _markers(folder, prefixes, settings.get("prompts") or {})
    is_third = settings.get("model_type") == "ColBERT"
    words = own.get("skiplist_words")
    return ColbertSettings(
        _expansion(folder, expansion),
        markers,
        prompts,
        _lengths(own.get("query_length") if expansion is None else None, own.get("document_length")),
        skipped_ids=skipped_ids(folder, string.punctuation if words is None else words) if is_third else None,
        modules=(NormalizeModule(),) if is_third else (),
    )


def _stanford(folder: Path, metadata: Mapping[str, Any], raw: Mapping[str, Any]) -> ColbertSettings:
    names = {"query": ("query_token_id", "[unused0]"), "document": ("doc_token_id", "[unused1]")}
    prefixes = {role: f"{metadata.get(name) or default} " for role, (name, default) in names.items()}
    markers, prompts = _markers(folder, prefixes, {})
    expansion = {
        "strategy": "fixed",
        "attend": bool(metadata.get("attend_to_mask_tokens")),
        "length": metadata.get("query_maxlen") or _LENGTH,
    }
    skipped = string.punctuation if metadata.get("mask_punctuation", True) else ""
    size, hidden = (
        _length(metadata.get("dim") or raw.get("dim") or 128, "dim"),
        _length(raw["hidden_size"], "hidden_size"),
    )
    return ColbertSettings(
        _expansion(folder, expansion),
        markers,
        prompts,
        _lengths(None, metadata.get("doc_maxlen")),
        skipped_ids(folder, skipped),
        (DenseModule("", hidden, size, False, "none", False), NormalizeModule()),
    )


def _markers(
    folder: Path, prefixes: Mapping[str, object], saved: Mapping[str, str]
) -> tuple[dict[PoolRole, int], dict[str, str]]:
    """Return the tokens and the texts that stand before queries and documents.

    A prefix is a token if the vocabulary has it, with or without the space after it. Otherwise it is text.
    """
    markers: dict[PoolRole, int] = {}
    prompts: dict[str, str] = {}
    roles: Sequence[PoolRole] = ("query", "document")
    for role in roles:
        prefix = prefixes[role]
        if not isinstance(prefix, str) or not prefix:
            continue
        text = (saved.get(role) or "").removeprefix(prefix)
        first = (prefix.split(None, 1) or [""])[0]
        known = token_ids(folder, (prefix, first))
        if prefix in known:
            markers[role] = known[prefix]
        elif first in known:
            markers[role], text = known[first], prefix.removeprefix(first) + text
        else:
            text = prefix + text
        prompts[role] = text
    return markers, prompts


def _expansion(folder: Path, values: object) -> QueryExpansion | None:
    if values is None:
        return None
    if not isinstance(values, Mapping) or values.get("strategy") not in ("fixed", "min"):
        raise ModelError(f"query_expansion must be an object whose strategy is fixed or min, not {values!r:.80}")
    special = special_tokens(folder, read_object(folder / "tokenizer_config.json"))
    token = values.get("token") or special.get("mask_token")
    if token is None:
        raise ModelError("queries are expanded with the mask token, and the tokenizer's files name none (mask_token)")
    if (token_id := token_ids(folder, (str(token),)).get(str(token))) is None:
        raise ModelError(f"queries are expanded with the token {token!r:.80}, which the tokenizer does not have")
    length = _length(values.get("length"), "the length of query_expansion")
    return QueryExpansion(token_id, length, bool(values.get("attend")), values["strategy"] == "fixed")


def skipped_ids(folder: Path, words: object) -> frozenset[int]:
    """Return the ids of tokens without vectors. Words that are no single token are left out.

    Raises ModelError if the list or the tokenizer cannot be read.
    """
    if not isinstance(words, list | tuple | str) or not all(isinstance(word, str) for word in words):
        raise ModelError(f"skiplist_words must be a list of words, not {words!r:.80}")
    return frozenset(token_ids(folder, words).values())


def _lengths(query: object, document: object) -> dict[PoolRole, int]:
    lengths: dict[PoolRole, int] = {}
    if query is not None:
        lengths["query"] = _length(query, "query_length")
    if document is not None:
        lengths["document"] = _length(document, "document_length")
    return lengths


def _length(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
        raise ModelError(f"{name} must be a positive whole number, not {value!r:.80}")
    return value
