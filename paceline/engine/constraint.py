"""Which tokens grammars allow next, worked out on a thread of its own while the model computes.

The runner tells what it has sampled and drafted for a row; when it has to choose the row's next tokens, one forward
pass later, the masks are there. The host's scheduler knows nothing of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from paceline.core.errors import ConstraintError, ModelError
from paceline.core.grammar import LIMITS, grammar_of
from paceline.core.grammar_errors import NO_TOKEN, explain
from paceline.core.types import Constraint, ConstraintKind

MASK_SECONDS = 60.0
"""The library's limits end the slowest masks of a step long before; who waits for longer waits for a dead thread."""

_CACHED_GRAMMARS = 64
"""Clients send one schema again and again, and a request that finds no room comes back with its own."""


class GrammarError(Exception):
    """An output cannot be continued under its grammar."""


class Matcher:
    """One output on its way through a grammar.

    `masks` says which tokens may come: uint8 [bytes], one bit a token from the lowest on, behind the output; then
    behind it and the first draft, and so on as far as the grammar follows the drafts. `error` says why none may come
    behind the output itself.
    """

    def __init__(self, start: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._start = start
        """At the grammar's start, and never moved: others begin there too."""
        self._matcher = start.deep_copy()
        self._end_token_ids = end_token_ids
        self.masks: list[np.ndarray] = []
        self.error = ""

    def restart(self, output: Sequence[int]) -> None:
        """Begins at the grammar's start, and follows what was generated before the request came here."""
        self._matcher = self._start.deep_copy()
        self.advance(output, ())

    def advance(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Takes in tokens that were sampled, and looks ahead along the drafts behind them."""
        self._matcher.consume_tokens(list(tokens))
        self.masks, self.error = [], ""
        if (mask := self._mask(self._matcher)) is None:
            self.error = f"the answer cannot go on: {_reason(self._matcher)}"
            return
        self.masks.append(mask)
        ahead = self._matcher.deep_copy()  # a draft may lead nowhere, and never be accepted
        for draft in drafts:
            if draft in self._end_token_ids or not _has(mask, draft):
                return
            ahead.consume_token(draft)
            if (mask := self._mask(ahead)) is None:
                return
            self.masks.append(mask)

    def _mask(self, matcher: LLMatcher) -> np.ndarray | None:
        """None where no token is possible."""
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        ends = [token for token in self._end_token_ids if _has(mask, token)]
        if ends and not matcher.is_accepting():
            # The grammar names the token itself, somewhere inside; but it would end the request here.
            mask = mask.copy()
            for token in ends:
                mask[token >> 3] &= ~np.uint8(1 << (token & 7))
        return None if matcher.is_error() or not mask.any() else mask


def _reason(matcher: LLMatcher) -> str:
    return explain(matcher.get_error() or NO_TOKEN)


def _has(mask: np.ndarray, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


class Move(NamedTuple):
    """What became of a row in a step."""

    tokens: Sequence[int]
    """Those that were sampled."""
    drafts: Sequence[int]
    """What may come behind them."""


class Grammars:
    """Compiles constraints for the tokenizer of a model folder, which is read when the first one comes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tokenizer.json"
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        """At the start of each grammar; those used last come last."""
        self._tokenizer: LLTokenizer | None = None
        self._end_token_ids: frozenset[int] = frozenset()

    def compile(self, constraint: Constraint) -> Matcher:
        """Takes milliseconds, the first time seconds. Raises ConstraintError or ModelError. From any thread."""
        with self._lock:
            if (matcher := self._compiled.get(constraint)) is not None:
                self._compiled.move_to_end(constraint)
        if matcher is None:
            grammar = grammar_of(constraint.kind, constraint.text)
            matcher = LLMatcher(self._tokenizer_for(constraint.end_token_ids), grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                own_text = constraint.kind is ConstraintKind.GRAMMAR
                raise ConstraintError(explain(matcher.get_error(), with_place=own_text))
            with self._lock:
                self._compiled[constraint] = matcher
                if len(self._compiled) > _CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return Matcher(matcher, constraint.end_token_ids)

    def _tokenizer_for(self, end_token_ids: frozenset[int]) -> LLTokenizer:
        """In practice there is one set of end tokens: the model's own."""
        with self._lock:
            if self._tokenizer is None or end_token_ids != self._end_token_ids:
                try:
                    self._tokenizer = LLTokenizer(str(self._path), eos_token=sorted(end_token_ids))
                except ValueError as error:
                    raise ModelError(f"cannot constrain outputs with {self._path}: {error}") from error
                self._end_token_ids = end_token_ids
            return self._tokenizer


class Constraints:
    """The matchers of the rows of a device's state."""

    def __init__(self, rows: int) -> None:
        self._matchers: list[Matcher | None] = [None] * rows
        self._ready: dict[int, Future[None]] = {}
        # One thread: what concerns a matcher is done in the order in which it was told.
        self._thread = ThreadPoolExecutor(1, "engine-grammar")

    def join(self, row: int, matcher: Matcher | None, output: Sequence[int]) -> None:
        """A request takes the row; with a matcher where it has a constraint."""
        self._matchers[row] = matcher
        if matcher is not None:
            self._ready[row] = self._thread.submit(matcher.restart, output)

    def rule(self, row: int) -> bool:
        """Whether the row has a constraint."""
        return self._matchers[row] is not None

    def advance(self, moves: Mapping[int, Move]) -> None:
        """Tells what rows have got; those without a constraint are of no interest."""
        own = {row: matcher for row in moves if (matcher := self._matchers[row]) is not None}
        if own:
            done = self._thread.submit(_advance_all, [(matcher, moves[row]) for row, matcher in own.items()])
            self._ready.update(dict.fromkeys(own, done))

    def masks(self, row: int) -> list[np.ndarray] | None:
        """See Matcher; None where the row has no constraint. Raises GrammarError where no token is possible."""
        matcher = self._matchers[row]
        if matcher is None:
            return None
        self._ready[row].result(MASK_SECONDS)
        if matcher.error:
            raise GrammarError(matcher.error)
        return matcher.masks


def _advance_all(moves: Sequence[tuple[Matcher, Move]]) -> None:
    for matcher, move in moves:
        try:
            matcher.advance(move.tokens, move.drafts)
        except Exception as error:  # whatever a library says of one grammar concerns one request
            matcher.error = f"the answer cannot go on: {explain(str(error))}"
