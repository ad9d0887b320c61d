"""The bytes of every token, and the text of tokens that come one by one."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers

from paceline.core.errors import ModelError
from paceline.services.gateway.planning.answers.expressions import Spelling


class Vocabulary:
    """The bytes of each token id.

    A token may be a part of a character, so it stands for bytes and not for text. Both families of tokenizers that
    cover all bytes are supported: byte-level BPE, and SentencePiece with byte fallback.

    Args:
        generates: whether the model generates tokens. Otherwise nobody asks for the bytes of one, and any family is
            right.

    Raises:
        ModelError: the tokenizer's decoder does not work on bytes.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, generates: bool = True) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._steps = _decoder_steps(tokenizer) if generates else []
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Ids of the tokens that stand for a fixed text, such as a marker of reasoning, by text."""

    @cached_property
    def own_tokens(self) -> dict[str, int]:
        """Ids, by text, of added tokens that the grammar library does not match as text: special ones and <…>."""
        tokens = self.added_tokens.items()
        return {text: own for text, own in tokens if own in self.special_ids or (text[:1], text[-1:]) == ("<", ">")}

    @cached_property
    def spelling(self) -> Spelling:
        """The spelling of texts in this model's grammars, made once: a model may have thousands of added tokens."""
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
        """Return the text of one token by itself. A part of a character becomes U+FFFD."""
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
        """GPT-2's byte alphabet, character to byte: printable bytes are themselves, others follow from U+0100 on."""
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


class Detokenizer:
    """Decoder of the text of one generated sequence.

    Args:
        vocabulary: the bytes of each token.
        stop: strings that end the text; none of them is empty.
        stop_token_ids: ids of tokens that end the text and are no part of it.
        include_stop: whether the stop string or the stop token's text stays at the end.
        skip_special_tokens: whether special tokens are left out of the text.
        kept_token_ids: ids of special tokens that stay in the text anyway.
        min_tokens: number of tokens after which the text may end at a stop string. As in vLLM, a stop string counts if
            it ends after these tokens, even if it begins within them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        kept_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._stop_token_ids = stop_token_ids
        self._include_stop = include_stop
        self._skipped = vocabulary.special_ids - kept_token_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._tokens = 0
        self.stop_reason: str | int | None = None
        """The stop string, or the id of the stop token, that ended the text; None if neither has."""
        self.cut_off = ""
        """The stop string that was left out at the end of the text; "" if there is none."""

    @property
    def held(self) -> bytes:
        """The bytes of the last tokens whose text is not certain yet."""
        return self._held.encode() + self._decoder.getstate()[0]

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is certain now. After a stop, ignore it and return ""."""
        if self.stop_reason is not None:
            return ""
        self._tokens += 1
        if token_id in self._stop_token_ids:
            self.stop_reason = token_id
            # A client that asks for the stop token gets its text, even if the token is special.
            text = self._take(self._vocabulary.token_bytes(token_id)) if self._include_stop else ""
            return text + self.finish()
        if token_id in self._skipped:
            return ""
        return self._take(self._vocabulary.token_bytes(token_id))

    def finish(self) -> str:
        """End the sequence. Return the text that was held back; half a character becomes U+FFFD."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _take(self, data: bytes) -> str:
        held, text = len(self._held), self._held + self._decoder.decode(data)
        self._held = ""
        if not self._stop:
            return text
        if self._tokens > self._min_tokens and (found := self._first_stop(text, held)) is not None:
            start, stop = found
            self.stop_reason = stop
            self._decoder.reset()
            if self._include_stop:
                return text[: start + len(stop)]
            self.cut_off = stop
            return text[:start]
        certain = len(text) - self._possible_start(text)
        self._held = text[certain:]
        return text[:certain]

    def _first_stop(self, text: str, held: int) -> tuple[int, str] | None:
        """Return the place of the first stop string in `text`, and the stop string; None if there is none.

        Only stop strings that end after the first `held` characters count. The first one is the one that ends first; if
        several end at the same place, the longest.
        """
        starts = ((text.find(stop, max(0, held + 1 - len(stop))), stop) for stop in self._stop)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
