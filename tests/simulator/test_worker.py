"""A simulated worker: coalesced steps against single ones, and both against the engine's own scheduler."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.step_times import Drafts, Spread, WorkerTimes
from paceline.core.types import Token
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import ChunkResult, NeedsBlocks, Sampled, Step, StepResult
from paceline.simulator.events import Events
from paceline.simulator.rows import SimulatedRow
from paceline.simulator.sequence import Sequence
from paceline.simulator.series import Yields, ratios_of
from paceline.simulator.steps import Kit, Run
from paceline.simulator.worker import SimulatedWorker
from tests.engine.toy_requests import make_request
from tests.simulator.tiny import UNEVEN, step_times, worker_times


@dataclass
class Host:
    """A host with blocks for everything."""

    name: str = "h"
    workers: list[SimulatedWorker] = field(default_factory=list)


yields = functools.cache(lambda drafts: Yields(drafts, 3))


class Owner:
    """Lets sequences decode where their prompt was computed, and notes when they get their first and last tokens."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.seconds = 0.0

    def computed(self, worker: SimulatedWorker, sequence: Sequence, tokens: int) -> None:
        if not sequence.is_computing:
            self.first[sequence.number] = self.events.now
            sequence.done += 1
            if sequence.left:
                worker.decode(sequence, capacity=4096)
            else:
                self.ended(worker, sequence)

    def ended(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        self.last[sequence.number] = self.events.now

    def needs_blocks(self, worker: SimulatedWorker, row: SimulatedRow) -> None:
        worker.rows.grown(row, worker.rows.length(row) + 64)

    def stepped(self, worker: SimulatedWorker, run: Run) -> None:
        self.seconds += run.seconds(run.steps)


Load = list[tuple[float, int, int]]
"""Instants, prompt tokens and answer tokens of requests."""


def simulated(times: WorkerTimes, load: Load, is_coalesced: bool) -> Owner:
    events = Events()
    owner = Owner(events)
    kit = Kit(
        times, ratios_of(times.steps.prefill_spread, 1), ratios_of(times.steps.decode_spread, 2), yields(times.drafts)
    )
    kits = {"prefill": kit, "decode": kit}
    worker = SimulatedWorker(0, "decode", Host(), kits, events, owner, is_coalesced=is_coalesced)  # type: ignore[arg-type]
    worker.state = "ready"
    for number, (at, prompt, answer) in enumerate(load):
        sequence = Sequence(number, at, prompt, answer, "", [], context=prompt)
        events.at(at, worker.compute, sequence)
    events.run(lambda: False)
    assert not worker.has_work
    assert worker.queued_tokens == 0
    return owner


def scheduled(times: WorkerTimes, load: Load) -> Owner:
    """Run the engine's scheduler as `Engine` does, with `planned_steps` steps in flight beside the one under way."""
    events = Events()
    owner = Owner(events)
    limits = Limits(times.max_batched_tokens, 4096, len(load))
    scheduler = Scheduler(limits)
    steps: deque[Step] = deque()
    began = 0.0
    requests = [make_request(str(n), list(range(p)), a, capacity=4096) for n, (_, p, a) in enumerate(load)]

    def plan() -> None:
        while len(steps) <= times.planned_steps and not (steps and scheduler.is_long(steps[-1])):
            if (step := scheduler.plan()) is None:
                break
            steps.append(step)
            if len(steps) == 1:
                begin()

    def begin() -> None:
        nonlocal began
        began = events.now
        tokens = pairs = rows = context = 0.0
        for chunk in steps[0].chunks:
            if chunk.follows:
                rows, context = rows + 1, context + chunk.start + 1
            else:
                tokens, pairs = tokens + chunk.length, pairs + chunk.length * (chunk.start + chunk.length / 2)
        seconds = times.steps.mixed_seconds(int(tokens), pairs, rows, context)
        events.after(seconds, end)

    def end() -> None:
        step, seconds = steps.popleft(), events.now - began
        if steps:
            begin()
        results = [ChunkResult([Token(1)] if chunk.samples else []) for chunk in step.chunks]
        scheduler.apply(step, StepResult(results, seconds))
        for event in scheduler.take_events():
            if isinstance(event, Sampled):
                number = int(event.key.request_id)
                owner.first.setdefault(number, events.now)
                owner.last[number] = events.now
            assert not isinstance(event, NeedsBlocks)
        plan()

    def add(number: int) -> None:
        scheduler.add(requests[number])
        plan()

    for number, (at, _, _) in enumerate(load):
        events.at(at, add, number)
    events.run(lambda: False)
    return owner


instants = st.integers(0, 300).map(lambda number: 0.000_313_7 + number * 0.010_763_1)
"""Instants of arrivals. Steps take about whole milliseconds, and none ends exactly at such an instant."""
loads = st.lists(st.tuples(instants, st.integers(2, 300), st.integers(1, 60)), min_size=1, max_size=8).map(sorted)
"""Requests whose prompts have at least two tokens, because the engine computes a single one as if it were decoding."""
times_of_workers = st.builds(
    lambda planned, context, pair: worker_times(
        step_times(decode_context=context, prefill_pair=pair), planned_steps=planned, max_seqs=8
    ),
    st.integers(0, 1),
    st.sampled_from([0.0, 1e-5]),
    st.sampled_from([0.0, 1e-6]),
)


@settings(max_examples=60)
@given(times_of_workers, loads, st.sampled_from([Spread(), UNEVEN]), st.sampled_from([0, 2]))
def test_coalesced_steps_give_what_single_steps_give(
    times: WorkerTimes, load: Load, spread: Spread, drafts: int
) -> None:
    steps = times.steps.model_copy(update={"prefill_spread": spread, "decode_spread": spread, "draft": 0.001})
    if drafts:
        steps = steps.model_copy(update={"decode_context": 0.0})  # with drafts, contexts count with their mean
    accepted = Drafts(most=drafts, accepted=(0.7, 0.5)[:drafts])
    times = times.model_copy(update={"steps": steps, "drafts": accepted})
    one, many = simulated(times, load, is_coalesced=False), simulated(times, load, is_coalesced=True)
    assert many.first == pytest.approx(one.first)
    assert many.last == pytest.approx(one.last)
    assert many.seconds == pytest.approx(one.seconds)


@settings(max_examples=60)
@given(times_of_workers, loads)
def test_coalesced_steps_give_what_the_scheduler_of_the_engine_gives(times: WorkerTimes, load: Load) -> None:
    ours, engine = simulated(times, load, is_coalesced=True), scheduled(times, load)
    assert ours.first == pytest.approx(engine.first)
    assert ours.last == pytest.approx(engine.last)
