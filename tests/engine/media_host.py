"""A scheduler and a runner over few blocks, which finds computed blocks again by their names."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from paceline.core.context import Context
from paceline.core.kv_layout import NO_SLOT, make_layout
from paceline.core.types import Key, SamplingParams
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Chunk, Filled, NeedsBlocks, Preempted, Removed, Sampled, Sealed, Step, StepResult
from paceline.models.base import Model
from tests.engine.loops import NO_GRAMMARS, Encodings
from tests.engine.media_models import Prompt

MAX_TOKENS = 256


@dataclass(eq=False)
class _Asked:
    prompt: Prompt
    context: Context


@dataclass
class MediaHost:
    """Runs requests with two steps in flight. Unused memory is NaN."""

    model: Model
    budget: int
    contexts: float = 4.0
    """Contexts of MAX_TOKENS tokens for which there are blocks."""
    cache: dict[tuple[int, bytes], torch.Tensor] = field(default_factory=dict)
    """Content of sealed blocks, by group and name."""
    max_tokens: int = 64
    """Tokens to sample after each prompt."""
    steps: list[bytes] = field(default_factory=list)
    """All steps, as bytes that another process could read."""
    results: list[StepResult] = field(default_factory=list)
    memory: torch.Tensor | None = None
    """The memory before the first step."""
    preempted: int = 0
    reused: list[int] = field(default_factory=list)
    """Tokens that each request has reused, in order of their starts."""

    def __post_init__(self) -> None:
        self.layout = make_layout(self.model.group_shapes, 4, "test")
        slots = self._kv_slots = round(self.contexts * self.layout.slots_for(MAX_TOKENS))
        self._free, self._free_for_encodings = list(range(slots)), list(range(slots, slots + 64))
        self._slots = torch.full((slots + 64, self.layout.slot_bytes // 4), float("nan"))
        self._encodings = Encodings(self.model, self._slots)
        self._limits = Limits(self.budget, MAX_TOKENS, 8, whole_media=self.model.config.whole_media)
        self._scheduler, self._runner = Scheduler(self._limits), self.runner(self._slots)
        self._names = count()
        self._held: dict[Key, list[list[int]]] = {}
        self._encoded: dict[Key, list[int]] = {}

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for step in self.steps for chunk in pickle.loads(step).chunks]

    def runner(self, slots: torch.Tensor) -> ModelRunner:
        """Return a runner over memory of this host's shape."""
        sources = (self.model, self.layout, slots.view(-1), self._limits)
        return ModelRunner(*sources, NO_GRAMMARS, encodings=Encodings(self.model, slots))

    def run(self, prompts: Sequence[Prompt], most_reused: int = 0, hands_over: bool = False) -> list[list[int]]:
        """Return greedy tokens after each prompt.

        Args:
            most_reused: most tokens of a prompt whose blocks come from the cache.
            hands_over: compute each prompt as a request of its own, and decode in its blocks without its encodings.
        """
        asked = [
            _Asked(prompt, Context(prompt.token_ids, media=[span for span, _ in prompt.media])) for prompt in prompts
        ]
        waiting, started = deque(asked), dict[Key, _Asked]()
        steps: deque[Step] = deque()
        while waiting or started:
            while waiting and (request := self._start(waiting[0], most_reused, hands_over)):
                started[request.key] = waiting.popleft()
            if self.memory is None:
                self.memory = self._slots.clone()
            while len(steps) < 2 and (step := self._scheduler.plan()):
                steps.append(step)
            if steps:
                self.steps.append(pickle.dumps(step := steps.popleft()))
                self.results.append(self._runner.execute(step))
                self._scheduler.apply(step, self.results[-1])
            for event in self._scheduler.take_events():
                match event:
                    case Sealed(key, group, first, hashes):
                        for block, name in enumerate(hashes, first):
                            self.cache[group, name] = self._slots[self._held[key][group][block]].clone()
                    case NeedsBlocks(key, tokens):
                        if self._grow(key, tokens):
                            self._scheduler.grow(key, self._held[key])
                        else:
                            self._scheduler.starve(key)
                    case Sampled(key, _, reason) if reason is not None:
                        self._scheduler.remove(key)
                    case Filled(key):
                        own = started.pop(key)
                        started[self._take_over(key, own)] = own
                    case Removed(key):
                        self._release(key)
                        del started[key]
                    case Preempted(key):
                        self.preempted += 1
                        self._release(key)
                        waiting.append(started.pop(key))
        return [own.context.token_ids[len(own.prompt.token_ids) :] for own in asked]

    def _start(self, own: _Asked, most_reused: int, hands_over: bool) -> Request | None:
        """Start a request with all the blocks that it needs now; None if there are too few."""
        key, length = Key(str(next(self._names)), 1, 1), len(own.context)
        if not self._grow(key, length + 1):
            return None
        reused = self._reuse(key, own.context, min(most_reused, length - 1))
        self.reused.append(reused)
        request = self._request(key, own, reused, hands_over)
        self._scheduler.add(request)
        for index, (span, rows) in enumerate(own.prompt.media):
            if span.end > reused:
                self._provide(key, index, rows)
        return request

    def _request(self, key: Key, own: _Asked, computed: int, hands_over: bool) -> Request:
        tables = [list(table) for table in self._held[key]]
        sampling, prompt_len = SamplingParams(max_tokens=self.max_tokens), len(own.prompt.token_ids)
        return Request(key, own.context, prompt_len, sampling, self.layout, tables, computed, hands_over)

    def _take_over(self, key: Key, own: _Asked) -> Key:
        """Go on with a filled request in its blocks, as a decode worker does."""
        new = Key(str(next(self._names)), 1, 1)
        self._held[new] = self._held.pop(key)
        self._clear(self._encoded.pop(key, []))
        for index, group in enumerate(self.layout.groups):
            table = self._held[new][index]
            behind = group.first_needed_block(len(own.context) - 1)
            self._clear([slot for slot in table[:behind] if slot != NO_SLOT])
            table[:behind] = [NO_SLOT] * behind
        self._scheduler.add(self._request(new, own, len(own.context) - 1, False))
        return new

    def _provide(self, key: Key, index: int, rows: torch.Tensor) -> None:
        own = self._encodings.write(rows, self._free_for_encodings)
        self._scheduler.provide(key, index, own)
        self._encoded.setdefault(key, []).extend(own)

    def _grow(self, key: Key, tokens: int) -> bool:
        groups = self.layout.groups
        tables = self._held.setdefault(key, [[] for _ in groups])
        missing = [group.blocks_for(tokens) - len(table) for group, table in zip(groups, tables)]
        if sum(missing) > len(self._free):
            if not any(tables):
                del self._held[key]
            return False
        for table, lacks in zip(tables, missing):
            table.extend(self._free.pop() for _ in range(lacks))
        return True

    def _release(self, key: Key) -> None:
        self._clear([slot for table in self._held.pop(key) for slot in table if slot != NO_SLOT])
        self._clear(self._encoded.pop(key, []))

    def _clear(self, slots: list[int]) -> None:
        self._slots[slots] = float("nan")
        for slot in slots:
            (self._free if slot < self._kv_slots else self._free_for_encodings).append(slot)

    def _reuse(self, key: Key, context: Context, most: int) -> int:
        """Fill the longest prefix of at most `most` tokens from the cache. Return its length."""
        for length in range(most // self.layout.alignment * self.layout.alignment, 0, -self.layout.alignment):
            names = {
                (index, block): (index, context.block_name(self.layout, index, block, length))
                for index, group in enumerate(self.layout.groups)
                for block in range(group.first_needed_block(length), length // group.block_tokens)
            }
            if all(name in self.cache for name in names.values()):
                for (index, block), name in names.items():
                    self._slots[self._held[key][index][block]] = self.cache[name]
                return length
        return 0
