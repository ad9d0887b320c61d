"""The scheduler and blocks: blocks that requests fill, give back after a window has left them, and lack."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.context import Context
from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Filled, NeedsBlocks, Preempted, Removed, Sampled, Sealed, Step, StepResult, Trimmed
from tests.engine.toy_requests import FULL, MIXED, ToyDevice, make_request, next_token, run


def test_full_blocks_are_sealed_once_with_the_hashes_of_the_chain() -> None:
    prompt = list(range(50))
    scheduler = Scheduler(Limits(20, 4096, max_seqs=16))
    scheduler.add(make_request("a", list(prompt), 20))
    sealed = [event for event in run(scheduler) if isinstance(event, Sealed)]
    context = list(prompt)
    while len(context) < 69:  # the last sampled token is never computed
        context.append(next_token(context))
    assert [event.first_block for event in sealed] == [0, 1, 2, 3]
    assert [hash_ for event in sealed for hash_ in event.hashes] == Context(context).links(FULL.fingerprint)


@pytest.mark.parametrize("has_readers", [False, True])
def test_what_the_last_step_fills_is_left_to_who_gets_it_or_told_to_readers(has_readers: bool) -> None:
    scheduler = Scheduler(Limits(512, 4096, max_seqs=16))
    prompt, readers = list(range(1000)), {"has_readers": has_readers}
    scheduler.add(make_request("a", prompt, 20, MIXED, capacity=1024, only_first_token=True, **readers))
    told = [event for event in run(scheduler) if isinstance(event, Sealed | Trimmed | Filled)]
    assert told[-1] == Filled(Key("a", 1, 1), 1000, Context(prompt).name(MIXED.fingerprint, 1000))
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
    # 129 tokens are computed. The next query, at 129, sees keys from 90 on, which are in block 5.
    assert trims[-1].first_kept_block == 5
    assert request.tables[0][:5] == [NO_SLOT] * 5
    assert NO_SLOT not in request.tables[0][5:]
    assert NO_SLOT not in request.tables[1]


def test_a_request_asks_for_blocks_ahead_of_need_and_only_once() -> None:
    scheduler = Scheduler(Limits(64, 4096, max_seqs=16))
    scheduler.add(make_request("a", list(range(30)), 200, capacity=64))
    asked = [event for event in run(scheduler) if isinstance(event, NeedsBlocks)]
    assert len(asked) == 1
    assert asked[0].token_count > 64


def test_starving_preempts_the_newest_and_room_is_made_once_a_plan() -> None:
    scheduler = Scheduler(Limits(256, 4096, max_seqs=16))
    device = ToyDevice()
    for name in ("old", "middle", "new"):
        scheduler.add(make_request(name, list(range(30)), 200, capacity=32))
    step = scheduler.plan()
    assert step is not None
    scheduler.starve(Key("old", 1, 1))
    scheduler.starve(Key("middle", 1, 1))
    assert not any(isinstance(event, Preempted) for event in scheduler.take_events())  # a step still writes
    scheduler.apply(step, device.execute(step))
    preempted = [event.key.request_id for event in scheduler.take_events() if isinstance(event, Preempted)]
    assert preempted == ["new"]


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
    assert asks() == 0  # the newest request leaves only after the present step
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


@dataclass
class ToyPool:
    """A pool that only counts blocks. The blocks themselves are in the requests' tables."""

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


@pytest.mark.slow
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
    running: dict[Key, Request] = {}
    for _ in range(20_000):
        while waiting and pool.take(waiting[0].key, FULL.groups[0].blocks_for(len(waiting[0].token_ids) + 1)):
            request = waiting.pop(0)
            request.tables = [list(range(pool.used[request.key]))]
            running[request.key] = request
            scheduler.add(request)
        # answers arrive at random times
        while answers and data.draw(st.booleans()):
            ask = answers.pop(0)
            if ask.key in pool.used and pool.take(ask.key, FULL.groups[0].blocks_for(ask.token_count)):
                scheduler.grow(ask.key, [list(range(pool.used[ask.key]))])
            else:
                scheduler.starve(ask.key)
        while len(in_flight) < most_in_flight and (step := scheduler.plan()):
            assert sum(chunk.length for chunk in step.chunks) <= budget
            for chunk in step.chunks:
                assert chunk.end <= pool.used[chunk.key] * 16
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
                    assert all(key != chunk.key for step, _ in in_flight for chunk in step.chunks)
                    pool.release(key)
                case NeedsBlocks():
                    answers.append(event)
                case Preempted(key):
                    assert all(key != chunk.key for step, _ in in_flight for chunk in step.chunks)
                    pool.release(key)
                    request = running[key]
                    again = make_request(key.request_id, request.token_ids, request.sampling.max_tokens)
                    again.key, again.prompt_len = Key(key.request_id, 1, key.generation + 1), request.prompt_len
                    waiting.append(again)
        assert scheduler.check() == []
        if not waiting and len(removed) == len(prompts) and not pool.used:
            break
    assert pool.free == pool_blocks
    for index, (length, tokens) in enumerate(prompts):
        context = [index] * length
        for _ in range(tokens):
            context.append(next_token(context))
        assert outputs[str(index)] == context[length:]
