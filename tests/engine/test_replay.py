"""Steps are plain values. Another process that replays them over the same KV gives the same tokens."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.context import Context
from paceline.core.speculative import SpeculativeConfig
from paceline.core.types import Key, SamplingParams
from paceline.engine.limits import Limits
from paceline.engine.loading import Loaded, load
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import (
    Event,
    Failed,
    NeedsBlocks,
    Preempted,
    Removed,
    RowAssigned,
    RowExtended,
    Sampled,
    Step,
    StepResult,
)
from paceline.kernels import select_kernels
from tests.engine.constrained_loop import regex, schema
from tests.services.gateway.toy_model import END, VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

CPU = torch.device("cpu")
LIMITS = Limits(max_batched_tokens=40, max_model_len=256, max_seqs=8, max_drafts=3)
TEXT = 'abc {"a": [1, 2], "b": "aaa"} abc '
ADOPTED = 48
"""Tokens of the first request whose KV is in the pool before the recording begins."""

REQUESTS = (
    SamplingParams(max_tokens=60),
    SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(max_tokens=20, prompt_logprobs=2, logprobs=3),
    SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=9,
        stop_token_ids=frozenset({END}),
        constraint=schema({"type": "array", "items": {"type": "integer"}, "maxItems": 4}),
    ),
    SamplingParams(max_tokens=60, temperature=1.3, seed=2, logit_bias={65: 2.0}, min_tokens=5),
    SamplingParams(max_tokens=10, constraint=regex("(")),
)


@dataclass
class Recording:
    pool: Tensor
    """KV before the first step."""
    steps: list[bytes] = field(default_factory=list)
    outcomes: list[list[tuple[object, ...]]] = field(default_factory=list)
    """Tokens, drafts, accepted drafts, prompt scores and failure, by step and chunk."""
    happened: set[str] = field(default_factory=set)


def loaded(folder: Path) -> Loaded:
    drafts = SpeculativeConfig("early_layers", 3, num_layers=2, adaptive=False)
    return load(folder, torch.float32, CPU, select_kernels(CPU, "native"), drafts)


def empty_pool(model: Loaded, slots: int) -> Tensor:
    return torch.full((slots * model.layout.slot_bytes // 4,), float("nan"))


def outcomes(result: StepResult) -> list[tuple[object, ...]]:
    return [(own.tokens, own.drafted, own.accepted, own.scores, str(own.failure)) for own in result.chunks]


def record(model: Loaded, pool: Tensor) -> Recording:
    """Run all requests, two steps in flight, over too few blocks."""
    free, names = list(range(4 * len(pool) // model.layout.slot_bytes)), count()
    groups = model.layout.groups

    held: dict[Key, list[list[int]]] = {}

    def grow(key: Key, tokens: int) -> bool:
        """Give a request all blocks for `tokens` tokens, if there are enough."""
        tables = held.setdefault(key, [[] for _ in groups])
        missing = [group.blocks_for(tokens) - len(table) for group, table in zip(groups, tables)]
        if sum(missing) > len(free):
            return False
        for table, lacks in zip(tables, missing):
            table.extend(free.pop() for _ in range(lacks))
        return True

    def made(context: Context, prompt_len: int, sampling: SamplingParams, computed: int = 0) -> Request | None:
        key = Key(str(next(names)), 1, 1)
        if not grow(key, len(context) + 1):
            return None
        tables = [[*table] for table in held[key]]
        return Request(key, context, prompt_len, sampling, model.layout, tables, computed)

    prompts = [list((TEXT * 3)[: 60 + 7 * index].encode()) for index in range(len(REQUESTS))]
    adopted = made(Context(prompts[0]), len(prompts[0]), REQUESTS[0], ADOPTED)
    assert adopted is not None
    fill(model, pool, replace(adopted, context=Context(prompts[0][:ADOPTED]), prompt_len=ADOPTED, computed_len=0))

    recording, runner = Recording(pool.clone()), model.runner(pool, LIMITS)
    scheduler = Scheduler(LIMITS, Speculation(LIMITS.max_drafts, adaptive=False))
    scheduler.add(adopted)
    running = {adopted.key: adopted}
    waiting = deque((Context(prompt), len(prompt), how) for prompt, how in list(zip(prompts, REQUESTS))[1:])
    in_flight: deque[Step] = deque()

    def handle(event: Event) -> None:
        recording.happened.add(type(event).__name__)
        match event:
            case NeedsBlocks(key, tokens):
                if grow(key, tokens):
                    scheduler.grow(key, held[key])
                else:
                    scheduler.starve(key)
            case Sampled(key, _, reason) if reason is not None:
                scheduler.remove(key)
            case Failed(key):
                scheduler.remove(key)
            case Removed(key) | Preempted(key):
                request = running.pop(key)
                free.extend(slot for table in held.pop(key) for slot in table)
                if isinstance(event, Preempted):
                    waiting.append((request.context, request.prompt_len, request.sampling))

    while running or waiting:
        while waiting and (request := made(*waiting[0])) is not None:
            waiting.popleft()
            running[request.key] = request
            scheduler.add(request)
        while len(in_flight) < 2 and (step := scheduler.plan()) is not None:
            in_flight.append(step)
        if in_flight:
            recording.steps.append(pickle.dumps(step := in_flight.popleft()))
            result = runner.execute(step)
            recording.outcomes.append(outcomes(result))
            scheduler.apply(step, result)
        for event in scheduler.take_events():
            handle(event)
    return recording


def fill(model: Loaded, pool: Tensor, request: Request) -> None:
    """Compute the KV of a request's context, as a prefill worker does."""
    scheduler, runner = Scheduler(LIMITS), model.runner(pool, LIMITS)
    scheduler.add(replace(request, only_first_token=True))
    while (step := scheduler.plan()) is not None:
        scheduler.apply(step, runner.execute(step))


def replay(folder: Path, pool: Tensor, steps: list[bytes]) -> tuple[list[object], Tensor]:
    """Compute steps that another process has recorded; return their outcomes, and the KV after the last one."""
    runner = loaded(folder).runner(pool, LIMITS)
    return [outcomes(runner.execute(pickle.loads(step))) for step in steps], pool


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "slots"),
    [("llama", 24), ("granite_hybrid", 10)],  # too few slots for all requests, so that one is preempted
)
def test_a_process_that_replays_recorded_steps_gives_the_same_tokens_and_kv(
    family: str, slots: int, other: ProcessPoolExecutor, tmp_path: Path
) -> None:
    write_toy_model(tmp_path)
    write_tiny(tmp_path, family, vocab_size=VOCAB_SIZE, num_key_value_heads=3)
    pool = empty_pool(model := loaded(tmp_path), slots)
    recording = record(model, pool)

    steps: list[Step] = [pickle.loads(step) for step in recording.steps]
    chunks = [chunk for step in steps for chunk in step.chunks]
    results = [own for step in recording.outcomes for own in step]
    assert {"Preempted", "NeedsBlocks", "Sealed", "Scored", "Failed"} <= recording.happened
    assert {type(update) for step in steps for update in step.updates} == {RowAssigned, RowExtended}
    assert any(not chunk.samples for chunk in chunks)
    assert any(chunk.start == ADOPTED and chunk.prefills for chunk in steps[0].chunks)
    assert any(accepted for _, _, accepted, _, _ in results)

    found, replayed = other.submit(replay, tmp_path, recording.pool, recording.steps).result(120)
    assert found == recording.outcomes
    # Compare bits, because NaN is not equal to itself.
    assert torch.equal(replayed.view(torch.int32), pool.view(torch.int32))
