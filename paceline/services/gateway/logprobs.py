"""Logprobs as the two OpenAI endpoints and vLLM spell them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.types import Logprob, Token
from paceline.services.gateway.tokenizer import Vocabulary

_LEAST = -9999.0
"""JSON has no infinity; vLLM's stand-in for the logprob of an excluded token."""


class LogprobFormat:
    """Formats tokens' reports.

    Args:
        count: most likely tokens to show.
        as_ids: shows each token as `token_id:7` rather than by its text, which several tokens may share.
    """

    def __init__(self, vocabulary: Vocabulary, count: int, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._count = count
        self._as_ids = as_ids

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        content = []
        for token in tokens:
            chosen, top = self._split(token)
            content.append({**self._chat_entry(chosen), "top_logprobs": [self._chat_entry(entry) for entry in top]})
        return {"content": content, "refusal": None}

    def completion(
        self, tokens: Sequence[Token | None], token_ids: Sequence[int], offset: int
    ) -> tuple[dict[str, Any], int]:
        """`logprobs` of a completion choice, and the offset in characters behind the last token.

        Args:
            tokens: reports; None for the first token of a prompt, which nothing predicts.
            token_ids: what the reports are about.
            offset: where the first token begins.
        """
        names: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token, token_id in zip(tokens, token_ids, strict=True):
            names.append(self._name(token_id))
            offsets.append(offset)
            offset += len(self._vocabulary.token_text(token_id))
            if token is None or not token.logprobs:
                logprobs.append(None)
                tops.append(None)
                continue
            chosen, top = self._split(token)
            logprobs.append(_finite(chosen))
            tops.append({self._name(entry.token_id): _finite(entry) for entry in (*top, chosen)})
        fields = {"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops}
        return fields, offset

    def prompt(self, tokens: Sequence[Token | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each prompt token, its report by token id."""
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
        """The chosen token's entry, and the most likely ones, which may hold it again."""
        ranked = {entry.token_id: entry for entry in token.logprobs if entry.rank <= self._count}
        return token.logprobs[0], sorted(ranked.values(), key=lambda entry: entry.rank)

    def _chat_entry(self, entry: Logprob) -> dict[str, Any]:
        token_bytes = list(self._vocabulary.token_bytes(entry.token_id))
        return {"token": self._name(entry.token_id), "logprob": _finite(entry), "bytes": token_bytes}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._vocabulary.token_text(token_id)


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
