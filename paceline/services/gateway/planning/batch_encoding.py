"""Many texts as token ids at once, and their cut to a number of tokens that keeps special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import tokenizers

from paceline.services.gateway.planning.tokenizer import Tokenizer

Text = str | tuple[str, str]
"""A text, or a pair of texts that the model reads as one input."""


class Encoded(Protocol):
    """The tokens of one input."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def second_start(self) -> int:
        """Number of tokens before the second text of a pair, if the model distinguishes the two; else 0."""

    @property
    def least_tokens(self) -> int:
        """Least number of tokens to which the input can be cut."""

    @property
    def special_end(self) -> int:
        """Number of special tokens at the end."""

    def __len__(self) -> int: ...

    def cut(self, limit: int, side: Literal["start", "end"]) -> Encoded:
        """Return the input with `limit` tokens, of which some on one side are left out."""


class EncodedText:
    """Token ids without special tokens, such as those that a client has sent."""

    second_start = special_end = 0
    least_tokens = 1

    def __init__(self, token_ids: Sequence[int], second_start: int = 0) -> None:
        self.token_ids = token_ids
        self.second_start = second_start

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, limit: int, side: Literal["start", "end"]) -> EncodedText:
        return EncodedText(self.token_ids[-limit:] if side == "start" else self.token_ids[:limit])


class TokenizedText:
    """The tokens of a text or a pair, with special tokens, as the tokenizers library gives them."""

    def __init__(self, encoding: tokenizers.Encoding, is_pair: bool) -> None:
        self._encoding = encoding
        self._is_pair = is_pair
        self.token_ids: Sequence[int] = encoding.ids

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def second_start(self) -> int:
        if not self._is_pair:
            return 0
        types: list[int] = self._encoding.type_ids
        return types.index(1) if 1 in types else 0

    @property
    def least_tokens(self) -> int:
        return sum(self._encoding.special_tokens_mask) + (2 if self._is_pair else 1)

    @property
    def special_end(self) -> int:
        mask: list[int] = self._encoding.special_tokens_mask
        return next((index for index, special in enumerate(reversed(mask)) if not special), len(mask))

    def cut(self, limit: int, side: Literal["start", "end"]) -> EncodedText:
        """Return the input with `limit` tokens. Special tokens stay, and of a pair the longer text is cut first."""
        mask, parts = self._encoding.special_tokens_mask, self._encoding.sequence_ids
        own = [[place for place, part in enumerate(parts) if part == which and not mask[place]] for which in (0, 1)]
        lengths = longest_first(len(own[0]), len(own[1]), limit - sum(mask))
        dropped = {
            place
            for places, length in zip(own, lengths, strict=True)
            for place in (places[: len(places) - length] if side == "start" else places[length:])
        }
        kept = [place for place in range(len(self)) if place not in dropped]
        second = self.second_start
        start = sum(place < second for place in kept) if second else 0
        return EncodedText([self.token_ids[place] for place in kept], start)


class MarkedText:
    """A text with a token that says whether it is a query or a document.

    Args:
        place: number of special tokens before it.
    """

    second_start = 0

    def __init__(self, text: Encoded, marker: int, place: int) -> None:
        self._text, self._marker, self._place = text, marker, place
        self.token_ids: Sequence[int] = [*text.token_ids[:place], marker, *text.token_ids[place:]]
        self.least_tokens, self.special_end = text.least_tokens + 1, text.special_end

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, limit: int, side: Literal["start", "end"]) -> MarkedText:
        """Return the text with `limit` tokens. Special tokens and the marker stay."""
        return MarkedText(self._text.cut(limit - 1, side), self._marker, self._place)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths to which two texts are cut so that they fit into `room` tokens together.

    The longer one loses tokens until both are equal, and then both do, as in Hugging Face's "longest_first".
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[tuple[Text, str]], add_special_tokens: bool
) -> list[TokenizedText]:
    """Return the tokens of texts, which are tokenized in one call of the library. Raises InvalidRequestError.

    Args:
        texts: each text or pair, and the field that has it, for errors.
    """
    encodings = tokenizer.encode_batch(texts, add_special_tokens)
    return [
        TokenizedText(encoding, isinstance(text, tuple)) for encoding, (text, _) in zip(encodings, texts, strict=True)
    ]
