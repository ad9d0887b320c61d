"""A real tokenizer with the markers of a form, and the texts that grammars allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from paceline.core.grammar import grammar_of
from paceline.core.types import ConstraintKind
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.toy_model import END


class Vocabulary:
    """A tokenizer, whose markers are tokens of their own or not, and the texts that a grammar allows."""

    def __init__(self, folder: Path, own: Sequence[str]) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.add_tokens(list(own))
        self._tokenizer.save(str(path))
        self._matching = LLTokenizer(str(path), eos_token=[END])
        self.spelling = Tokenizer(folder).vocabulary.spelling
        self._latest: tuple[str, LLMatcher] | None = None

    def allows(self, grammar: str, text: str) -> bool:
        """Return whether a text is a whole answer under a grammar."""
        matcher = self._matcher(grammar).deep_copy()
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if not mask[token >> 3] >> (token & 7) & 1:
                return False
            matcher.consume_token(token)
        return matcher.is_accepting()

    def _matcher(self, grammar: str) -> LLMatcher:
        """Return the matcher at the beginning of an answer. Tests ask about many texts under one grammar."""
        if self._latest is None or self._latest[0] != grammar:
            matcher = LLMatcher(self._matching, grammar_of(ConstraintKind.ANSWER, grammar), log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            self._latest = grammar, matcher
        return self._latest[1]

    def random_answer(self, grammar: str, random: Random) -> str | None:
        """Return the first whole answer on a random path through a grammar; None if it is too long."""
        matcher = self._matcher(grammar).deep_copy()
        ids: list[int] = []
        while not matcher.is_accepting():
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            # Tokens that may end a value come often, so that most answers end.
            ends = [token for token in allowed if token > END or chr(token) in '"}]>/,<\n']
            ids.append(random.choice(ends if ends and random.random() < 0.5 else allowed))
            matcher.consume_token(ids[-1])
            if len(ids) > 400:
                return None
        tokens = (bytes([token]) if token < END else self._tokenizer.id_to_token(token).encode() for token in ids)
        return b"".join(tokens).decode(errors="replace")
