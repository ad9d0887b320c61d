"""Unguessable texts that stand for media in conversations and prompts, so that no text of a client can forge media."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from paceline.services.gateway.planning.media.items import ItemKind

Json = dict[str, Any]


class MediaMarks:
    """Unguessable texts that a chat template writes instead of the model's markers.

    A client may write a marker such as `<|image|>` in a message, even spread over several fields that the template
    joins. So the markers in the template's own source are replaced by these marks before the source is compiled. Then a
    mark in the rendered text comes from the template alone.

    Args:
        markers: the model's marker for each kind: the text that its template writes for an item.
    """

    def __init__(self, markers: Mapping[ItemKind, str]) -> None:
        self._markers = dict(markers)
        # Letters and digits pass through all filters of templates.
        self._marks: dict[str, ItemKind] = {f"media{secrets.token_hex(16)}": kind for kind in markers}
        self._any_mark = re.compile("|".join(self._marks) or r"(?!)")

    def hide_markers(self, source: str) -> str:
        """Return a template's source with the unguessable marks in place of the model's markers."""
        for mark, kind in self._marks.items():
            source = source.replace(self._markers[kind], mark)
        return source

    def show_markers(self, rendered: str) -> str:
        """Return a rendered text with the model's markers in place of the unguessable marks."""
        if not self._marks:
            return rendered
        return self._any_mark.sub(lambda found: self._markers[self._marks[found[0]]], rendered)

    def marker(self, kind: ItemKind) -> str:
        """Return the model's marker for an item of a kind."""
        return self._markers[kind]

    def split(self, rendered: str) -> tuple[list[str], list[ItemKind]]:
        """Return the texts around the marks of a rendered text, and the kind of each mark: one less than texts."""
        if not self._marks:  # A search for nothing takes long in a long text.
            return [rendered], []
        kinds = [self._marks[mark] for mark in self._any_mark.findall(rendered)]
        return self._any_mark.split(rendered), kinds


class ReservedTokens:
    """A tokenizer whose reserved tokens have unguessable texts.

    A prompt with media can then be tokenized as one text, as in the model's training. This matters because many
    tokenizers treat the beginning of a text differently. A client's text that looks like a reserved token is ordinary
    text.

    Args:
        file: contents of the model's tokenizer.json.
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
    """Rename tokens in the vocabulary, and remove the merges that make them."""
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
