"""Formats logprobs as the two OpenAI endpoints and vLLM do. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from paceline.core.types import Logprob, Token
from paceline.services.gateway.planning.vocabulary import Vocabulary

_LEAST = -9999.0
"""Lowest logprob in answers, in place of -infinity, which JSON lacks. vLLM uses the same value for excluded tokens."""


class TextOffsets:
    """Finds the offset of each token in a text, in characters, while the tokens come one by one.

    A token that continues a character has the character's offset. Bytes that are no character count as the U+FFFD that
    the text has for them.

    Args:
        start: offset of the first token in characters; negative if the text lacks the tokens' first characters.
    """

    def __init__(self, start: int = 0) -> None:
        self._end = start
        """Offset, in characters, of the first byte that belongs to no counted character."""
        self._pending = b""
        """Bytes of the incomplete character that begins at `_end`."""

    def push(self, data: bytes) -> int:
        """Take the bytes of the next token. Return the token's offset in characters."""
        if data and self._pending and not _may_begin(self._pending + data[:1]):
            self._end += len(self._pending.decode(errors="replace"))
            self._pending = b""
        offset = max(0, self._end)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end += len(decoder.decode(self._pending + data))
        self._pending = decoder.getstate()[0]
        return offset


def _may_begin(data: bytes) -> bool:
    """Return whether bytes may be the beginning of valid UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


class LogprobFormat:
    """Formatter of tokens' logprobs.

    Args:
        vocabulary: the text and bytes of each token.
        count: the number of most likely tokens to show.
        as_ids: whether to show tokens as `token_id:7` instead of as text. Several tokens may have the same text.
        shows_all: whether to show all tokens that were reported, because the request names them.
    """

    def __init__(self, vocabulary: Vocabulary, count: int, as_ids: bool, shows_all: bool = False) -> None:
        self._vocabulary = vocabulary
        self._count = count
        self._shows_all = shows_all
        self._as_ids = as_ids

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the `logprobs` object of a chat choice, without tokens whose logprobs are not known."""
        content = []
        for token in tokens:
            if not token.logprobs:
                continue
            chosen, top = self._split(token)
            content.append({**self._chat_entry(chosen), "top_logprobs": [self._chat_entry(entry) for entry in top]})
        return {"content": content, "refusal": None}

    def ids(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the `logprobs` object of a choice of POST /inference/v1/generate, which has ids and no texts."""
        content = []
        for token in tokens:
            chosen, top = self._split(token)
            others = [_id_entry(entry) for entry in top if entry.token_id != chosen.token_id]
            content.append({**_id_entry(chosen), "top_logprobs": [_id_entry(chosen), *others]})
        return {"content": content}

    def completion(
        self, tokens: Sequence[Token | None], token_ids: Sequence[int], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Return the `logprobs` object of a completion choice.

        Args:
            tokens: the tokens with their logprobs; None for the first token of a prompt, which has none.
            token_ids: the id of each of these tokens.
            offsets: offset of each of these tokens in the text, in characters.
        """
        names: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token, token_id in zip(tokens, token_ids, strict=True):
            names.append(self._key(token_id))
            if token is None or not token.logprobs:
                logprobs.append(None)
                tops.append(None)
                continue
            chosen, top = self._split(token)
            logprobs.append(_finite(chosen))
            shown: dict[str, float] = {}
            for entry in (chosen, *top):  # as in vLLM, the chosen token comes first
                key = self._key(entry.token_id)
                if key in shown and entry.token_id != chosen.token_id:
                    key = f"token_id:{entry.token_id}"  # another token with the same text
                shown.setdefault(key, _finite(entry))
            tops.append(shown)
        return {"text_offset": [*offsets], "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops}

    def prompt(self, tokens: Sequence[Token | None]) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`: for each prompt token logprob, rank and text by token id, or else None."""
        return [None if token is None or not token.logprobs else self._prompt_entry(token) for token in tokens]

    def _prompt_entry(self, token: Token) -> dict[str, Any]:
        chosen, top = self._split(token)
        return {
            str(entry.token_id): {
                "logprob": _finite(entry),
                "rank": entry.rank,
                "decoded_token": self._vocabulary.token_text(entry.token_id),
            }
            for entry in (chosen, *top)
        }

    def _split(self, token: Token) -> tuple[Logprob, list[Logprob]]:
        """Return the chosen token's entry and the entries of likely tokens to show, which may include the chosen token.

        The latter are the `count` most likely ones, or all reported ones in their order if `shows_all`.
        """
        if self._shows_all:
            return token.logprobs[0], list({entry.token_id: entry for entry in token.logprobs}.values())
        ranked = {entry.token_id: entry for entry in token.logprobs if entry.rank <= self._count}
        return token.logprobs[0], sorted(ranked.values(), key=lambda entry: entry.rank)

    def _chat_entry(self, entry: Logprob) -> dict[str, Any]:
        token_bytes = list(self._vocabulary.token_bytes(entry.token_id))
        return {"token": self._name(entry.token_id), "logprob": _finite(entry), "bytes": token_bytes}

    def _key(self, token_id: int) -> str:
        """Return the name by which logprobs of completions show a token.

        As in OpenAI's API, the name of a token that is no text by itself has its bytes.
        """
        data = self._vocabulary.token_bytes(token_id)
        if self._as_ids or _is_text(data):
            return self._name(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._vocabulary.token_text(token_id)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _id_entry(entry: Logprob) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": _finite(entry), "rank": entry.rank}


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
