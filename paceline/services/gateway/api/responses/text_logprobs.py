"""The logprobs of a message's text, without those of reasoning, markers and calls."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

from paceline.core.types import Token
from paceline.services.gateway.api.logprobs import LogprobFormat
from paceline.services.gateway.planning.vocabulary import Vocabulary

Json = dict[str, Any]


class TextLogprobs:
    """Finds the tokens of a text among all tokens that have come.

    Args:
        count: the number of most likely tokens to show.
        as_ids: whether a token is shown as `token_id:7`.
    """

    def __init__(self, vocabulary: Vocabulary, count: int, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._format = LogprobFormat(vocabulary, count, as_ids)
        self._tokens: list[Token] = []
        """Tokens whose text has not come."""

    def push(self, tokens: Sequence[Token]) -> None:
        """Take new tokens."""
        self._tokens += tokens

    def drop(self) -> None:
        """Forget tokens: their text is no message."""
        self._tokens.clear()

    def take(self, text: str, held: bytes = b"") -> list[Json]:
        """Return the logprobs of the tokens of a text, which are the latest that have it.

        Args:
            held: the bytes of the last tokens whose text comes later. They may be the same text again.
        """
        pieces, wanted = [self._vocabulary.token_bytes(token.id) for token in self._tokens], text.encode()
        begin = b"".join(pieces).removesuffix(held).rfind(wanted)
        first, end = 0, len(pieces)
        if begin >= 0:  # else bytes that are no character, for which the text has U+FFFD
            ends = list(itertools.accumulate(map(len, pieces)))
            first = bisect.bisect_right(ends, begin)
            end = bisect.bisect_left(ends, begin + len(wanted)) + 1
        tokens, self._tokens = self._tokens[first:end], self._tokens[end:]
        entries: list[Json] = self._format.chat(tokens)["content"]
        return entries
