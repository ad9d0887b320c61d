"""Requests to a toy model, and a device that computes them without kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.context import Context
from paceline.core.kv_layout import GroupShape, KVLayout, make_layout
from paceline.core.media import MediaSpan
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Chunk, ChunkResult, RowAssigned, RowEncoded, Step, StepResult

FULL = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test")
MIXED = make_layout(
    (GroupShape("sliding", tuple(range(4)), 1, 8, window=40), GroupShape("full", (4,), 1, 8)), 4, "test"
)
STATES = make_layout((GroupShape("state", tuple(range(2)), 1, 8, window=2), GroupShape("full", (2,), 1, 8)), 4, "test")
"""A layout whose last blocks are kept at the ends of prompts and answers."""


def next_token(context: Sequence[int]) -> int:
    """Return the next token of a toy model, an arbitrary function of the whole context."""
    return (sum(context) * 31 + len(context)) % 1000


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int,
    layout: KVLayout = FULL,
    capacity: int = 1024,
    media: Sequence[MediaSpan] = (),
    **more: object,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    tables = [list(range(group.blocks_for(capacity))) for group in layout.groups]
    context = Context(prompt, media=media)
    return Request(Key(name, 1, 1), context, len(prompt), params, layout, tables, **more)  # type: ignore[arg-type]


class ToyDevice:
    """A device with rows. It knows the results of earlier steps, and accepts some of its drafts."""

    def __init__(self, accept: Callable[[int], int] = lambda most: most) -> None:
        self.contexts: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self._accept = accept

    def execute(self, step: Step) -> StepResult:
        for update in step.updates:
            if isinstance(update, RowAssigned):
                self.contexts[update.row], self.limits[update.row] = list(update.token_ids), update.limit
            if not isinstance(update, RowEncoded):
                self.blocks[update.row] = len(update.tables[0])
        return StepResult([self._compute(chunk) for chunk in step.chunks])

    def _compute(self, chunk: Chunk) -> ChunkResult:
        context, limit = self.contexts[chunk.row], self.limits[chunk.row]
        assert chunk.end <= self.blocks[chunk.row] * 16
        if not chunk.samples:
            assert chunk.end < len(context)
            return ChunkResult()
        assert chunk.start >= len(context) - 1 if chunk.follows else chunk.end == len(context)
        most = min(chunk.length, limit - len(context)) if chunk.follows else 1
        tokens = []
        for _ in range(self._accept(most) if most else 0):
            context.append(next_token(context))
            tokens.append(Token(context[-1]))
        return ChunkResult(tokens, max(most - 1, 0))


def run(scheduler: Scheduler) -> list[object]:
    """Run all requests of a scheduler that has not planned a step yet, and return the events."""
    events: list[object] = []
    device = ToyDevice()
    while step := scheduler.plan():
        scheduler.apply(step, device.execute(step))
        events += scheduler.take_events()
        assert scheduler.check() == []
    return events
