"""Turns token ids into text as they come. Pure: no I/O, no clock.

Text is returned as soon as it is certain. Half a character is held back, and so is text that may begin a stop string.
The work for a token does not depend on the number of tokens before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.services.gateway.planning.vocabulary import Vocabulary


class Detokenizer:
    """Decoder of the text of one generated sequence.

    Args:
        vocabulary: the bytes of each token.
        stop: strings that end the text; none of them is empty.
        stop_token_ids: ids of tokens that end the text and are no part of it.
        include_stop: whether the stop string or the stop token's text stays at the end.
        skip_special_tokens: whether special tokens are left out of the text.
        kept_token_ids: special tokens that are not left out.
        min_tokens: the number of tokens before the text may end at a stop string. As in vLLM, a stop string counts if
            it begins within these tokens and ends after them.
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
        """The stop string or the stop token's id that ended the text; None until then."""
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
        """Return the text that was held back, after the last token. Half a character becomes U+FFFD."""
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
        """Return the start of a stop string in `text`, and the stop string; None if there is none.

        Only stop strings that end after the first `held` characters count. The one that ends first is returned; if
        several end at the same place, the longest one.
        """
        starts = ((text.find(stop, max(0, held + 1 - len(stop))), stop) for stop in self._stop)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
