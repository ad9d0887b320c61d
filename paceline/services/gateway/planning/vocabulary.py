"""The bytes of every token, so that text can be joined token by token."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import tokenizers

from paceline.core.errors import ModelError
from paceline.services.gateway.planning.answers.expressions import Spelling


class Vocabulary:
    """The bytes of each token id.

    A token may be a part of a character, so it stands for bytes and not for text. Both families of tokenizers that
    cover all bytes are supported: byte-level BPE, and SentencePiece with byte fallback.

    Raises:
        ModelError: the tokenizer's decoder does not work on bytes.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._steps = _decoder_steps(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Ids of the tokens that stand for a fixed text, such as a marker of reasoning, by text."""

    @cached_property
    def own_tokens(self) -> dict[str, int]:
        """Ids of added tokens that are no text for the grammar library: special ones and those in angle brackets."""
        tokens = self.added_tokens.items()
        return {text: own for text, own in tokens if own in self.special_ids or (text[:1], text[-1:]) == ("<", ">")}

    @cached_property
    def spelling(self) -> Spelling:
        """The spelling of texts in grammars. It is made once, because a model may have thousands of added tokens."""
        return Spelling(self.own_tokens)

    def prepare(self) -> None:
        """Make the tables that are otherwise made at their first use."""
        _ = self.spelling, self._byte_alphabet

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an id without a token, such as the padding of a vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(self._tokenizer.id_to_token(token_id) or "")
        return known

    def token_text(self, token_id: int) -> str:
        """Return a token alone as text; a part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _spell(self, token: str) -> bytes:
        for step in self._steps:
            kind = step["type"]
            if kind == "ByteLevel":
                alphabet = self._byte_alphabet
                # An added token may have characters outside the alphabet, such as a space. It is its own text.
                return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
            if kind == "ByteFallback" and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
                return bytes.fromhex(match[1])
            if kind == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            if kind == "Metaspace":
                token = token.replace(step["replacement"], " ")
        return token.encode()

    @cached_property
    def _byte_alphabet(self) -> dict[str, int]:
        """GPT-2's alphabet, character to byte: printable bytes are themselves, all others follow from U+0100 on."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    # Fuse only joins. Strip removes a space at the start of a whole text; generated text continues a prompt.
    known = {"ByteLevel", "ByteFallback", "Metaspace", "Fuse", "Strip"}
    for step in steps:
        if step["type"] not in known and not (step["type"] == "Replace" and "String" in step["pattern"]):
            raise ModelError(
                f"tokenizer.json has a decoder of type {step['type']}, which cannot be decoded token by token"
            )
    return steps
