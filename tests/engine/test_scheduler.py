"""The scheduler against a toy model and a toy block pool: whatever happens, each request gets exactly its tokens."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.hashing import HashChain
from paceline.core.kv_layout import NO_SLOT, GroupShape, KVLayout, make_layout
from paceline.core.types import FinishReason, Key, SamplingParams, Token
from paceline.engine.request import Request
from paceline.engine.scheduler import Limits, Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import (
    Chunk,
    ChunkResult,
    Computed,
    Filled,
    Joined,
    NeedsBlocks,
    Preempted,
    Removed,
    Sampled,
    Sealed,
    Step,
    StepResult,
    Trimmed,
)

FULL = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test")
MIXED = make_layout(
    (GroupShape("sliding", tuple(range(4)), 1, 8, window=40), GroupShape("full", (4,), 1, 8)), 4, "test"
)


def next_token(context: list[int]) -> int:
    """A toy model: any function of the whole context."""
    return (sum(context) * 31 + len(context)) % 1000


def make_request(
    name: str, prompt: list[int], max_tokens: int, layout: KVLayout = FULL, capacity: int = 1024, **more: object
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    tables = [list(range(group.blocks_for(capacity))) for group in layout.groups]
    chain = HashChain("x")
    return Request(Key(name, 1, 1), prompt, len(prompt), params, layout, chain, tables, **more)  # type: ignore[arg-type]


def compute(step: Step) -> StepResult:
    """A device without a memory of its own: right only where each step is applied before the next is planned."""
    tokens = [[Token(next_token(chunk.request.token_ids))] if chunk.samples else [] for chunk in step.chunks]
    return StepResult([ChunkResult(own) for own in tokens])


class ToyDevice:
    """A device with rows: it knows what the steps before have given, and accepts some of its drafts."""

    def __init__(self, accept: Callable[[int], int] = lambda most: most) -> None:
        self.contexts: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self._accept = accept

    def execute(self, step: Step) -> StepResult:
        for update in step.updates:
            if isinstance(update, Joined):
                self.contexts[update.row], self.limits[update.row] = list(update.token_ids), update.limit
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
    events: list[object] = []
    while step := scheduler.plan():
        scheduler.apply(step, compute(step))
        events += scheduler.take_events()
    return events


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    scheduler.add(make_request("a", list(range(80)), 1))
    lengths = []
    while step := scheduler.plan():
        lengths.append(step.chunks[0].length)
        scheduler.apply(step, compute(step))
    assert lengths == [32, 24, 24]


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ((20, 20, 20), [20, 20, 20]),
        ((3, 32, 32), [3 + 16, 16, 32]),
        ((4, 4, 4, 4, 4), [16, 4]),
        ((40, 10), [20, 20, 10]),
    ],
)
def test_what_is_half_full_of_prompts_takes_no_further_one(lengths: tuple[int, ...], steps: list[int]) -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    for number, length in enumerate(lengths):
        scheduler.add(make_request(str(number), list(range(length)), 1))
    planned = []
    while step := scheduler.plan():
        planned.append(sum(chunk.length for chunk in step.chunks))
        scheduler.apply(step, compute(step))
    assert planned == steps


def test_a_prompt_that_is_read_meanwhile_ends_with_a_short_chunk() -> None:
    spans = {}
    for tokens in (200, 300, 1000, 1200):
        scheduler = Scheduler(Limits(max_batched_tokens=512, max_model_len=4096, max_seqs=16))
        scheduler.add(make_request("read", list(range(tokens)), 1, capacity=2048, has_readers=True))
        spans[tokens] = [event.length for event in run(scheduler) if isinstance(event, Computed)]
    assert spans == {200: [200], 300: [172, 128], 1000: [436, 436, 128], 1200: [512, 280, 280, 128]}


def test_each_step_with_a_part_of_the_prompt_is_told_and_none_of_what_was_sampled() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    scheduler.add(make_request("a", list(range(80)), 4))
    scheduler.add(make_request("cached", list(range(49)), 4, computed_len=48))
    scheduler.add(make_request("first", list(range(49)), 4, computed_len=48, only_first_token=True))
    told = [event for event in run(scheduler) if isinstance(event, Computed)]
    spans = [(event.key.request_id, event.first, event.length) for event in told]
    assert spans[:2] == [("cached", 48, 1), ("first", 48, 1)]
    assert [span for span in spans if span[0] == "a"] == [("a", 0, 30), ("a", 30, 25), ("a", 55, 25)]
    assert len(spans) == 5


def test_what_a_request_takes_is_counted_with_it() -> None:
    scheduler = Scheduler(Limits(256, 4096, max_seqs=16, max_drafts=3), Speculation(most=3, adaptive=False))
    requests = [make_request(name, list(range(20)), 9) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    device = ToyDevice(accept=lambda most: min(most, 2))
    while step := scheduler.plan():
        scheduler.apply(step, device.execute(step))
    efforts = [request.effort for request in requests]
    assert sum(effort.drafts for effort in efforts) == scheduler.stats.drafts > 0
    assert sum(effort.draft_tokens for effort in efforts) == scheduler.stats.draft_tokens
    assert all(1 < effort.steps <= 9 for effort in efforts)


def test_decoding_comes_before_prompts() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    scheduler.add(make_request("prompt", list(range(100)), 1))
    scheduler.add(make_request("decoding", list(range(20)), 10, computed_len=19))
    step = scheduler.plan()
    assert step is not None
    assert [(chunk.request.key.request_id, chunk.length) for chunk in step.chunks] == [("decoding", 1), ("prompt", 31)]


def test_drafts_neither_keep_others_from_decoding_nor_prompts_from_going_on() -> None:
    scheduler = Scheduler(Limits(64, 4096, 64, 4), Speculation(4, adaptive=False))
    device = ToyDevice()
    for index in range(32):
        scheduler.add(make_request(f"{index}", [1, 2, 3, 4], 200, computed_len=3))
    prompt = make_request("prompt", list(range(200)), 5)
    scheduler.add(prompt)
    in_flight: deque[Step] = deque()
    for _ in range(10):
        while len(in_flight) < 2 and (step := scheduler.plan()):
            assert sum(chunk.length for chunk in step.chunks) <= 64
            assert len(step.chunks) == 33
            in_flight.append(step)
        step = in_flight.popleft()
        scheduler.apply(step, device.execute(step))
    assert prompt.computed_len >= 160
    assert scheduler.stats.draft_tokens > 0


def test_what_was_not_drafted_is_not_counted_as_computed() -> None:
    scheduler = Scheduler(Limits(64, 4096, 4, 4), Speculation(4, adaptive=False))
    device = ToyDevice(accept=lambda most: min(most, 1))
    scheduler.add(make_request("a", [1, 2, 3, 4], 50))
    while step := scheduler.plan():
        result = device.execute(step)
        scheduler.apply(step, StepResult([replace(chunk, drafted=0) for chunk in result.chunks]))
    assert scheduler.stats.computed_tokens == 4 + 49


def test_the_time_of_a_step_counts_for_each_request_in_it() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    scheduler.add(make_request("prompt", list(range(40)), 1))
    for name in "ab":  # as a decode worker adopts them: the first token is there, and behind it nothing is computed
        adopted = make_request(name, list(range(20)), 3, computed_len=20)
        adopted.token_ids.append(7)
        scheduler.add(adopted)
    for seconds, model_seconds in ((4.0, 3.0), (16.0, 8.0)):
        step = scheduler.plan()
        assert step is not None
        scheduler.apply(step, replace(compute(step), seconds=seconds, model_seconds=model_seconds))
    stats = scheduler.stats
    assert (stats.prefill_model_seconds, stats.prefill_other_seconds) == (11, 9)
    assert (stats.decode_model_seconds, stats.decode_other_seconds) == (22, 18)


def test_how_fast_prompts_are_computed_is_learned_of_large_steps() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=256, max_model_len=4096, max_seqs=16))
    scheduler.add(make_request("prompt", list(range(700)), 3))
    speeds = []
    for seconds in (2.0, 1.0, 0.1, 5.0):  # of 256, 222 and 222 tokens, and of one that was sampled
        step = scheduler.plan()
        assert step is not None
        scheduler.apply(step, replace(compute(step), seconds=seconds))
        speeds.append(scheduler.stats.prefill_tokens_per_second)
    assert speeds == [128, 139.75, 139.75 + (2220 - 139.75) / 8, speeds[2]]


def test_a_step_behind_the_end_of_a_request_is_no_time_of_it() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    scheduler.add(make_request("a", list(range(20)), 5))
    first = scheduler.plan()
    surplus = scheduler.plan()
    assert first is not None
    assert surplus is not None
    scheduler.apply(first, compute(first))
    scheduler.apply(surplus, StepResult([ChunkResult()], seconds=5.0, model_seconds=5.0))
    assert scheduler.stats.decode_model_seconds == 0


def test_output_ends_at_max_tokens_and_at_the_context_limit() -> None:
    for max_tokens, limit, expected in ((5, 4096, 5), (50, 24, 4)):
        scheduler = Scheduler(Limits(32, limit, max_seqs=16))
        scheduler.add(make_request("a", list(range(20)), max_tokens))
        sampled = [event for event in run(scheduler) if isinstance(event, Sampled)]
        assert len(sampled) == expected
        assert sampled[-1].reason is FinishReason.LENGTH


def test_a_stop_token_ends_the_request_unless_it_comes_too_early() -> None:
    prompt = list(range(20))
    stop = next_token([*prompt, next_token(prompt)])
    for min_tokens, expected in ((0, 2), (2, 2), (3, 10)):
        request = make_request("a", list(prompt), 10)
        request.sampling = SamplingParams(max_tokens=10, min_tokens=min_tokens, stop_token_ids=frozenset({stop}))
        scheduler = Scheduler(Limits(32, 4096, max_seqs=16))
        scheduler.add(request)
        sampled = [event for event in run(scheduler) if isinstance(event, Sampled)]
        assert len(sampled) == expected


def test_only_first_token_leaves_the_engine_without_a_reason() -> None:
    scheduler = Scheduler(Limits(32, 4096, max_seqs=16))
    scheduler.add(make_request("a", list(range(20)), 10, only_first_token=True))
    sampled = [event for event in run(scheduler) if isinstance(event, Sampled)]
    assert [event.reason for event in sampled] == [None]
    assert scheduler.plan() is None


def test_full_blocks_are_sealed_once_with_the_hashes_of_the_chain() -> None:
    prompt = list(range(50))
    scheduler = Scheduler(Limits(20, 4096, max_seqs=16))
    scheduler.add(make_request("a", list(prompt), 20))
    sealed = [event for event in run(scheduler) if isinstance(event, Sealed)]
    context = list(prompt)
    while len(context) < 69:  # the last sampled token is never computed
        context.append(next_token(context))
    chain = HashChain("x")
    chain.extend(context)
    assert [event.first_block for event in sealed] == [0, 1, 2, 3]
    assert [hash_ for event in sealed for hash_ in event.hashes] == chain.hashes


@pytest.mark.parametrize("has_readers", [False, True])
def test_what_the_last_step_fills_is_left_to_who_gets_it_or_told_to_readers(has_readers: bool) -> None:
    scheduler = Scheduler(Limits(512, 4096, max_seqs=16))
    prompt, readers = list(range(1000)), {"has_readers": has_readers}
    scheduler.add(make_request("a", prompt, 20, MIXED, capacity=1024, only_first_token=True, **readers))
    told = [event for event in run(scheduler) if isinstance(event, Sealed | Trimmed | Filled)]
    assert told[-1] == Filled(Key("a", 1, 1), 1000, HashChain("x").digest(prompt, 1000))
    ends = {event.group: event.first_block + len(event.hashes) for event in told if isinstance(event, Sealed)}
    trims = {event.first_kept_block for event in told if isinstance(event, Trimmed)}
    whole = {group: 1000 // MIXED.groups[group].block_tokens for group in (0, 1)}
    seen = MIXED.groups[0].first_needed_block
    assert (ends == whole) is has_readers
    assert (seen(1000) in trims) is has_readers
    assert ends[1] >= 500 // MIXED.groups[1].block_tokens


def test_blocks_behind_a_window_are_trimmed_and_the_others_kept() -> None:
    scheduler = Scheduler(Limits(16, 4096, max_seqs=16))
    request = make_request("a", list(range(100)), 30, MIXED)
    scheduler.add(request)
    trims = [event for event in run(scheduler) if isinstance(event, Trimmed)]
    assert {event.group for event in trims} == {0}
    # 129 tokens computed; the next query, at 129, sees keys from 90 on, in block 5
    assert trims[-1].first_kept_block == 5
    assert request.tables[0][:5] == [NO_SLOT] * 5
    assert NO_SLOT not in request.tables[0][5:]
    assert NO_SLOT not in request.tables[1]


def test_remove_is_confirmed_even_for_strangers() -> None:
    scheduler = Scheduler(Limits(16, 4096, max_seqs=16))
    request = make_request("a", list(range(4)), 30)
    scheduler.add(request)
    scheduler.remove(request.key)
    scheduler.remove(Key("nobody", 1, 1))
    assert scheduler.take_events() == [Removed(request.key), Removed(Key("nobody", 1, 1))]
    assert scheduler.plan() is None


def test_a_request_asks_for_blocks_ahead_of_need_and_only_once() -> None:
    scheduler = Scheduler(Limits(64, 4096, max_seqs=16))
    scheduler.add(make_request("a", list(range(30)), 200, capacity=64))
    asked = [event for event in run(scheduler) if isinstance(event, NeedsBlocks)]
    assert len(asked) == 1
    assert asked[0].token_count > 64


def test_starving_preempts_the_newest_and_room_is_made_once_a_plan() -> None:
    scheduler = Scheduler(Limits(256, 4096, max_seqs=16))
    for name in ("old", "middle", "new"):
        scheduler.add(make_request(name, list(range(30)), 200, capacity=32))
    step = scheduler.plan()
    assert step is not None
    scheduler.starve(Key("old", 1, 1))
    scheduler.starve(Key("middle", 1, 1))
    assert not any(isinstance(event, Preempted) for event in scheduler.take_events())  # a step in flight writes
    scheduler.apply(step, compute(step))
    preempted = [event.key.request_id for event in scheduler.take_events() if isinstance(event, Preempted)]
    assert preempted == ["new"]


@dataclass
class ToyPool:
    """Counts blocks; a request's blocks are those of its tables."""

    free: int
    used: dict[Key, int] = field(default_factory=dict)

    def take(self, key: Key, blocks: int) -> bool:
        more = blocks - self.used.get(key, 0)
        if more > self.free:
            return False
        self.free -= more
        self.used[key] = blocks
        return True

    def release(self, key: Key) -> None:
        self.free += self.used.pop(key)


def test_who_starves_asks_again_as_soon_as_a_preempted_request_is_out_of_the_engine() -> None:
    scheduler = Scheduler(Limits(64, 4096, 4))
    device = ToyDevice()
    for name, capacity in (("old", 16), ("new", 64)):
        scheduler.add(make_request(name, list(range(10)), 500, capacity=capacity))

    def asks() -> int:
        return sum(
            isinstance(event, NeedsBlocks) and event.key.request_id == "old" for event in scheduler.take_events()
        )

    under_way = scheduler.plan()
    assert under_way is not None
    assert asks() == 1
    scheduler.starve(Key("old", 1, 1))
    scheduler.plan()
    assert asks() == 0  # the newest leaves only when the step under way is over
    scheduler.apply(under_way, device.execute(under_way))
    scheduler.plan()
    assert asks() == 1


def test_who_starves_asks_again_even_if_the_preempted_request_is_removed() -> None:
    scheduler = Scheduler(Limits(64, 4096, 4))
    for name in ("old", "new"):
        scheduler.add(make_request(name, list(range(10)), 500, capacity=16))
    step = scheduler.plan()
    assert step is not None
    scheduler.starve(Key("old", 1, 1))
    scheduler.remove(Key("new", 1, 1))
    scheduler.take_events()
    scheduler.apply(step, ToyDevice().execute(step))
    scheduler.plan()
    assert NeedsBlocks(Key("old", 1, 1), 75) in scheduler.take_events()


@settings(max_examples=150)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 120)), min_size=1, max_size=8),
    pool_blocks=st.integers(14, 40),
    budget=st.integers(1, 64),
    rows=st.integers(1, 8),
    drafts=st.integers(0, 6),
    most_in_flight=st.integers(1, 3),
    data=st.data(),
)
def test_every_request_gets_its_tokens_on_a_small_pool(
    prompts: list[tuple[int, int]],
    pool_blocks: int,
    budget: int,
    rows: int,
    drafts: int,
    most_in_flight: int,
    data: st.DataObject,
) -> None:
    pool = ToyPool(pool_blocks)
    scheduler = Scheduler(Limits(budget, 4096, min(rows, budget), drafts))
    rng = random.Random(data.draw(st.integers(0, 1000)))
    device = ToyDevice(lambda most: rng.randint(1, most))
    in_flight: deque[tuple[Step, StepResult]] = deque()
    removed: set[str] = set()
    waiting = [make_request(str(index), [index] * length, tokens) for index, (length, tokens) in enumerate(prompts)]
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    answers: list[NeedsBlocks] = []
    for _ in range(20_000):
        while waiting and pool.take(waiting[0].key, FULL.groups[0].blocks_for(len(waiting[0].token_ids) + 1)):
            request = waiting.pop(0)
            request.tables = [list(range(pool.used[request.key]))]
            scheduler.add(request)
        # answers arrive late and in their own time
        while answers and data.draw(st.booleans()):
            ask = answers.pop(0)
            if ask.key in pool.used and pool.take(ask.key, FULL.groups[0].blocks_for(ask.token_count)):
                scheduler.grow(ask.key, [list(range(pool.used[ask.key]))])
            else:
                scheduler.starve(ask.key)
        while len(in_flight) < most_in_flight and (step := scheduler.plan()):
            assert sum(chunk.length for chunk in step.chunks) <= budget
            for chunk in step.chunks:
                assert chunk.end <= pool.used[chunk.request.key] * 16
            in_flight.append((step, device.execute(step)))
        if in_flight:
            scheduler.apply(*in_flight.popleft())
        for event in scheduler.take_events():
            match event:
                case Sampled(key, token, reason):
                    outputs[key.request_id].append(token.id)
                    if reason is not None:
                        scheduler.remove(key)  # as a worker does
                        removed.add(key.request_id)
                case Removed(key):
                    assert all(key != chunk.request.key for step, _ in in_flight for chunk in step.chunks)
                    pool.release(key)
                case NeedsBlocks():
                    answers.append(event)
                case Preempted(key, request):
                    assert all(key != chunk.request.key for step, _ in in_flight for chunk in step.chunks)
                    pool.release(key)
                    again = make_request(key.request_id, request.token_ids, request.sampling.max_tokens)
                    again.key, again.prompt_len = Key(key.request_id, 1, key.generation + 1), request.prompt_len
                    waiting.append(again)
        if not waiting and len(removed) == len(prompts) and not pool.used:
            break
    assert pool.free == pool_blocks
    for index, (length, tokens) in enumerate(prompts):
        context = [index] * length
        for _ in range(tokens):
            context.append(next_token(context))
        assert outputs[str(index)] == context[length:]
