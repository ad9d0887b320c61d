"""Masks of the tokens that grammars allow next, made on a thread of their own while the model computes.

The runner reports the tokens that it has sampled and drafted for a row. When it has to choose the row's next tokens,
one forward pass later, the masks are ready. Steps carry only the declaration of a constraint (`Constraint`): compiled
grammars and their state stay on the runner's side.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from paceline.core.end_tokens import read_end_token_ids
from paceline.core.errors import ModelError, PacelineError
from paceline.core.grammar import compile_grammar, grammar_of
from paceline.core.grammar_errors import NO_TOKEN, TOO_SLOW, explain
from paceline.core.types import Constraint

MASK_SECONDS = 60.0
"""Deadline for a step's masks, in seconds. The library's limits end the slowest masks long before it, so a mask thread
that misses the deadline is dead."""

MASK_BURST, MASK_PER_TOKEN, MASK_SHARE = 0.25, 0.01, 0.05
"""Budget of CPU time for the masks of one grammar: seconds at first and at most, seconds for each token, and the share
of the passing time by which the budget grows."""

_CACHED_GRAMMARS, _CACHED_CHARACTERS = 64, 4 << 20
"""Largest number of grammars that are kept although no request uses them, and largest sum of characters of their texts.
They are kept because clients send the same schema again and again. A compiled grammar takes up to 80 bytes for each
character."""


class GrammarError(Exception):
    """An output cannot be continued under its grammar."""


class MaskBudget:
    """The CPU time that is left for the masks of one grammar, for which all rows of a step wait.

    Usual masks take some ten microseconds, but in an ambiguous grammar they grow with the output. All outputs with the
    grammar share the budget, so that a request gains nothing by many choices.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = MASK_BURST
        self._at = clock()

    def spend(self, seconds: float, tokens: int) -> bool:
        """Subtract the CPU time of the masks after `tokens` tokens. Return whether the budget was enough."""
        now = self._clock()
        earned = MASK_PER_TOKEN * tokens + MASK_SHARE * (now - self._at)
        self._left, self._at = min(MASK_BURST, self._left + earned) - seconds, now
        return self._left >= 0


class Matcher:
    """The position of one output in its grammar.

    `masks` are the tokens that may come next: uint8 [bytes], one bit for each token, from the lowest bit on. The first
    mask is for the token after the output, the second for the token after the first draft, and so on until the first
    draft that the grammar forbids. `error` says why no token may come after the output.

    Args:
        output: tokens that were generated before the request came here.
    """

    def __init__(self, grammar: Grammar, output: Sequence[int]) -> None:
        self._matcher = grammar.start.deep_copy()
        self._end_token_ids = grammar.end_token_ids
        self._budget = grammar.budget
        self.masks: list[np.ndarray] = []
        self.error = ""
        self.advance(output, ())

    def advance(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Move past tokens that were sampled. Then make the masks along the drafts after these tokens."""
        began = time.thread_time()
        self._follow(tokens, drafts)
        is_within = self._budget.spend(time.thread_time() - began, len(tokens))
        if not is_within and not self.error:
            self.error = _cannot_continue(TOO_SLOW)

    def _follow(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))
        self.masks, self.error = [], ""
        if (mask := self._mask(self._matcher)) is None:
            self.error = _cannot_continue(self._matcher.get_error() or NO_TOKEN)
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
        """Return the mask of the next token; None if no token is possible."""
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        ends = [token for token in self._end_token_ids if _has(mask, token)]
        if ends and not matcher.is_accepting():
            # The grammar itself contains the token, but here it would end the request before the output is complete.
            mask = mask.copy()
            for token in ends:
                mask[token >> 3] &= ~np.uint8(1 << (token & 7))
        return None if matcher.is_error() or not mask.any() else mask


def _has(mask: np.ndarray, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


class RowProgress(NamedTuple):
    """The tokens that a step has given to a row."""

    tokens: Sequence[int]
    """Tokens that were sampled for the row, in order."""
    drafts: Sequence[int]
    """Tokens that were drafted after the sampled ones."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Grammar:
    """A compiled constraint."""

    start: LLMatcher
    """The matcher at the start of the grammar. It is copied, never moved."""
    end_token_ids: frozenset[int]
    characters: int
    """Number of characters of the constraint's text."""
    budget: MaskBudget = field(default_factory=MaskBudget)


class Grammars:
    """Compiled constraints for the tokenizer of a model folder.

    The tokenizer's file is opened here and parsed later, because another file may have replaced it by then. A grammar
    is kept while a request uses it. The most recently used grammars are kept longer, up to _CACHED_GRAMMARS and
    _CACHED_CHARACTERS.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "tokenizer.json"
        self._file: int | None = None
        if self._path.is_file():
            self._file = os.open(self._path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._digest = hashlib.sha256(_read(self._file)).digest()
        self._lock = threading.Lock()
        self._compiled: weakref.WeakValueDictionary[Constraint, Grammar] = weakref.WeakValueDictionary()
        self._recent: deque[Grammar] = deque(maxlen=_CACHED_GRAMMARS)
        self._compiling: dict[Constraint, Future[Grammar]] = {}
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._end_token_ids: frozenset[int] = frozenset()
        self.built = 0
        """Number of times that the tokenizer was built."""

    def prepare(self) -> None:
        """Build the tokenizer for the model's own end tokens. This takes seconds, during which no other thread runs.

        Must be called before requests are served. If the tokenizer cannot constrain outputs, `compile` raises the
        error.
        """
        with contextlib.suppress(ModelError):
            if ends := read_end_token_ids(self._folder, self._text()):
                self._tokenizer_for(ends)

    def find(self, constraint: Constraint) -> Grammar | None:
        """Return the compiled form of a constraint from the cache; None if it is not there."""
        with self._lock:
            return self._known(constraint)

    def compile(self, constraint: Constraint) -> Grammar:
        """Return the compiled constraint, within milliseconds if a gateway has tried the constraint. Any thread may
        call this.

        Raises:
            ConstraintError: the constraint cannot be compiled.
            ModelError: the model's tokenizer cannot be constrained.
        """
        with self._lock:
            if (grammar := self._known(constraint)) is not None:
                return grammar
            if is_first := (done := self._compiling.get(constraint)) is None:
                done = self._compiling[constraint] = Future()
        assert done is not None
        if is_first:
            try:
                done.set_result(self._compile(constraint))
            except BaseException as error:
                done.set_exception(error)
            with self._lock:
                del self._compiling[constraint]
                if done.exception() is None:
                    self._keep(constraint, done.result())
        return done.result()

    def _compile(self, constraint: Constraint) -> Grammar:
        text = constraint.grammar or grammar_of(constraint.kind, constraint.text)
        tokenizer = self._tokenizer_for(constraint.end_token_ids)
        return Grammar(compile_grammar(text, tokenizer, constraint.kind), constraint.end_token_ids, len(text))

    def _known(self, constraint: Constraint) -> Grammar | None:
        grammar = self._compiled.get(constraint)
        if grammar is not None:
            self._keep(constraint, grammar)
        return grammar

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        self._compiled[constraint] = grammar
        if grammar in self._recent:
            self._recent.remove(grammar)
        self._recent.append(grammar)
        while sum(each.characters for each in self._recent) > _CACHED_CHARACTERS:
            self._recent.popleft()

    def _tokenizer_for(self, end_token_ids: frozenset[int]) -> LLTokenizer:
        # In practice there is one set of end tokens: the model's own.
        with self._tokenizer_lock:
            if self._tokenizer is None or end_token_ids != self._end_token_ids:
                try:
                    self._tokenizer = LLTokenizer(self._text(), eos_token=sorted(end_token_ids))
                except ValueError as error:
                    raise ModelError(f"cannot constrain outputs with {self._path}: {error}") from error
                self._end_token_ids = end_token_ids
                self.built += 1
            return self._tokenizer

    def _text(self) -> str:
        """Return the text of the tokenizer's file. Raises ModelError if there is none or somebody has written to it."""
        if self._file is None:
            raise ModelError(f"cannot constrain outputs without {self._path}")
        content = _read(self._file)
        if hashlib.sha256(content).digest() != self._digest:
            raise ModelError(f"{self._path} has changed since this worker started; start the worker again")
        return content.decode()


def _read(descriptor: int) -> bytes:
    """Return the content of an open file from its beginning."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class Constraints:
    """The matchers of the rows of a device's state."""

    def __init__(self, rows: int, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: list[Future[Matcher] | None] = [None] * rows
        self._ready: dict[int, Future[Any]] = {}
        """The last task for the matcher of each row, by row."""
        # One thread, so that the tasks of a matcher are done in order.
        self._thread = ThreadPoolExecutor(1, "engine-grammar")

    def assign(self, row: int, constraint: Constraint | None, output: Sequence[int]) -> None:
        """Start a request in a row.

        Args:
            output: tokens that the request has generated before.
        """
        matcher = None if constraint is None else self._thread.submit(self._start, constraint, output)
        self._matchers[row] = matcher
        if matcher is not None:
            self._ready[row] = matcher

    def has(self, row: int) -> bool:
        """Return whether the row has a constraint."""
        return self._matchers[row] is not None

    def advance(self, progress: Mapping[int, RowProgress]) -> None:
        """Report the tokens that a step gave, by row, and start making the masks for the next step."""
        constrained = {row: matcher for row in progress if (matcher := self._matchers[row]) is not None}
        if constrained:
            done = self._thread.submit(_advance_all, [(matcher, progress[row]) for row, matcher in constrained.items()])
            self._ready.update(dict.fromkeys(constrained, done))

    def masks(self, row: int) -> list[np.ndarray] | None:
        """Wait for the masks of a row (`Matcher.masks`) and return them; None if the row has no constraint.

        Raises:
            GrammarError: the grammar cannot be compiled here, or it allows no token.
        """
        future = self._matchers[row]
        if future is None:
            return None
        self._ready[row].result(MASK_SECONDS)
        matcher = future.result()
        if matcher.error:
            raise GrammarError(matcher.error)
        return matcher.masks

    def _start(self, constraint: Constraint, output: Sequence[int]) -> Matcher:
        try:
            return Matcher(self._grammars.compile(constraint), output)
        except PacelineError as error:
            raise GrammarError(str(error)) from error
        except Exception as error:
            raise GrammarError(_cannot_continue(str(error))) from error


def _advance_all(all_progress: Sequence[tuple[Future[Matcher], RowProgress]]) -> None:
    for future, progress in all_progress:
        matcher = future.result()  # it is ready, because its task ran earlier on this thread
        try:
            matcher.advance(progress.tokens, progress.drafts)
        except Exception as error:  # an error in one grammar concerns one request
            matcher.error = _cannot_continue(str(error))


def _cannot_continue(reason: str) -> str:
    return f"the answer cannot go on: {explain(reason)}"
