"""The bytes of every token, so that text can be put together token by token."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import tokenizers

from paceline.core.errors import ModelError


class Vocabulary:
    """Token ids to bytes.

    A token may be a part of a character, so its own value is bytes. Both families of byte-complete tokenizers are
    known: byte-level BPE, and SentencePiece with byte fallback.

    Raises:
        ModelError: the tokenizer's decoder does not work on bytes.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._steps = _decoder_steps(tokenizer)
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; none for an id without a token, as in a padded vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(self._tokenizer.id_to_token(token_id) or "")
        return known

    def token_text(self, token_id: int) -> str:
        """A token alone as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _spell(self, token: str) -> bytes:
        for step in self._steps:
            kind = step["type"]
            if kind == "ByteLevel":
                alphabet = self._byte_alphabet
                # An added token may hold characters outside the alphabet, a space for instance: it stands for itself.
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
        """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    # Fuse joins; Strip takes a space from the start of a whole text, and ours continues a prompt.
    known = {"ByteLevel", "ByteFallback", "Metaspace", "Fuse", "Strip"}
    for step in steps:
        if step["type"] not in known and not (step["type"] == "Replace" and "String" in step["pattern"]):
            raise ModelError(
                f"tokenizer.json has a decoder of type {step['type']}, which cannot be decoded token by token"
            )
    return steps
