"""Words that must not be in an answer, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.services.gateway.tokenizer import Tokenizer


def sequences_of(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words, each at the beginning of a text and after a space, as vLLM does.

    Other ways to spell a word in tokens remain possible.

    Raises:
        InvalidRequestError: a word is not valid Unicode.
    """
    texts = [text for word in words for text in (word.lstrip() or word, " " + (word.lstrip() or word))]
    found = (tuple(tokenizer.encode(text, False, "bad_words")) for text in texts)
    return tuple(dict.fromkeys(sequence for sequence in found if sequence))
