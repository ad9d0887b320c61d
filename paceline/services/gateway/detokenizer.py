"""Token ids to text, as they come. Pure: no I/O, no clock.

Text comes out as soon as it is certain: never half a character, and never what may turn out to begin a stop string.
The work for a token does not depend on how many came before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.services.gateway.tokenizer import Vocabulary


class Detokenizer:
    """The text of one generated sequence.

    Args:
        vocabulary: bytes of each token.
        stop: strings that end the text; none is empty.
        stop_token_ids: tokens that end the text; such a token is no part of the text.
        include_stop: keeps the stop string, or the stop token's text, at the end.
        skip_special_tokens: special tokens are no part of the text.
        min_tokens: stop strings that end within the first `min_tokens` tokens do not count; one that begins there and
            ends later does, as in vLLM.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._stop_token_ids = stop_token_ids
        self._include_stop = include_stop
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._tokens = 0
        self.stop_reason: str | int | None = None
        """The stop string or stop token that ended the text."""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now. After a stop, takes nothing more."""
        if self.stop_reason is not None:
            return ""
        self._tokens += 1
        if token_id in self._stop_token_ids:
            self.stop_reason = token_id
            # Whoever asks to see the stop sees it, special or not.
            text = self._take(self._vocabulary.token_bytes(token_id)) if self._include_stop else ""
            return text + self.finish()
        if token_id in self._skipped:
            return ""
        return self._take(self._vocabulary.token_bytes(token_id))

    def finish(self) -> str:
        """What was held back, when no more tokens come. Half a character shows as U+FFFD."""
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
            return text[: start + len(stop)] if self._include_stop else text[:start]
        certain = len(text) - self._possible_start(text)
        self._held = text[certain:]
        return text[:certain]

    def _first_stop(self, text: str, held: int) -> tuple[int, str] | None:
        """Where the stop string that ends first begins, of those that end behind `held`; of two that end together, the
        longer one.
        """
        starts = ((text.find(stop, max(0, held + 1 - len(stop))), stop) for stop in self._stop)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
