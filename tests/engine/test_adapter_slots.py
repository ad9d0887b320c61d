"""The adapters in the device's slots, and requests with adapters in the scheduler and the decode loop."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.context import Context
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine.adapter_slots import TURN_STEPS, AdapterSlots
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import AdapterPlaced, ChunkResult, Sampled, StepResult
from tests.adapters import ALL, merged, write_adapter
from tests.engine.loops import Loop, load
from tests.models.adapters.test_adapted_models import load_adapted
from tests.tiny_checkpoints import write_tiny

A, B, C = b"a", b"b", b"c"


def step(slots: AdapterSlots, *adapters: bytes) -> tuple[AdapterPlaced, ...]:
    slots.begin(adapters)
    for adapter in adapters:
        assert slots.fits(adapter)
        slots.want(adapter)
    return slots.place()


def test_the_adapter_that_was_used_longest_ago_makes_room() -> None:
    slots = AdapterSlots(2)
    assert step(slots, A, B, A) == (AdapterPlaced(0, A), AdapterPlaced(1, B))
    assert step(slots, A) == ()
    assert step(slots, C) == (AdapterPlaced(1, C),)
    assert step(slots, A, C) == ()
    assert step(slots, B, C) == (AdapterPlaced(0, B),)
    # An adapter that the step needs stays, although it was used before the others.
    assert step(slots, B) == ()
    assert step(slots, A, C) == (AdapterPlaced(0, A),)


def test_a_step_has_no_more_adapters_than_slots() -> None:
    slots = AdapterSlots(1)
    slots.begin([A, B, A])
    assert slots.fits(A)
    assert slots.fits(b"")
    assert not slots.fits(B)
    assert not AdapterSlots(0).fits(A)


def turns(slots: AdapterSlots, steps: int, *adapters: bytes, background: tuple[bytes, ...] = ()) -> list[set[bytes]]:
    """Return the adapters of each step, if requests with all these adapters could continue in each of them."""
    seen = []
    for _ in range(steps):
        slots.begin(adapters, background)
        seen.append({adapter for adapter in (*adapters, *background) if slots.fits(adapter)})
    return seen


def test_adapters_take_turns_if_they_do_not_all_fit() -> None:
    assert turns(AdapterSlots(1), 3 * TURN_STEPS, A, B) == [{A}] * TURN_STEPS + [{B}] * TURN_STEPS + [{A}] * TURN_STEPS
    seen = turns(AdapterSlots(2), 3 * TURN_STEPS, A, B, C)
    assert [seen[TURN_STEPS * turn] for turn in range(3)] == [{A, B}, {C, A}, {B, C}]
    assert all(len(step) == 2 for step in seen)
    # A turn ends early if nobody needs it.
    slots = AdapterSlots(1)
    turns(slots, 3, A, B)
    assert turns(slots, 1, B, C) == [{B}]
    assert turns(slots, TURN_STEPS, B, C)[-1] == {C}


def test_adapters_of_the_background_come_last() -> None:
    assert turns(AdapterSlots(1), 40, A, background=(B, C)) == [{A}] * 40
    seen = turns(AdapterSlots(2), 2 * TURN_STEPS, A, background=(B, C, A))
    assert (seen[0], seen[-1]) == ({A, B}, {A, C})


def test_steps_that_are_meant_for_the_background_have_one_of_its_adapters() -> None:
    slots, seen = AdapterSlots(1), []
    for number in range(40):
        is_own = number % 10 == 9
        slots.begin([A], [B, C] if is_own else [], is_own)
        seen.append([adapter for adapter in (A, B, C) if slots.fits(adapter)])
    assert seen[9::10] == [[B], [C], [B], [C]]
    assert all(own == [A] for number, own in enumerate(seen) if number % 10 != 9)


def test_slots_follow_random_steps() -> None:
    rng, slots, there = random.Random(1), AdapterSlots(3), dict[int, bytes]()
    for _ in range(500):
        wanted = rng.sample([bytes([index]) for index in range(8)], rng.randint(0, 3))
        for placed in step(slots, *wanted):
            there[placed.slot] = placed.adapter
        assert set(wanted) <= set(there.values())
        assert set(there) <= {0, 1, 2}


LAYOUT = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test")


def test_requests_wait_while_a_step_has_as_many_other_adapters_as_slots() -> None:
    scheduler = Scheduler(Limits(64, 64, 8, max_adapters=1))
    for index, adapter in enumerate((A, B, b"", A)):
        tables = [[index * 8 + block for block in range(4)]]
        context = Context([1] * 5, adapter=adapter)
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        scheduler.add(Request(Key(str(index), 1, 1), context, 5, sampling, LAYOUT, tables))
    seen, placed = [], []
    while (planned := scheduler.plan()) is not None:
        seen.append([chunk.key.request_id for chunk in planned.chunks])
        placed += [update.adapter for update in planned.adapters]
        results = [ChunkResult([Token(1)] if chunk.samples else []) for chunk in planned.chunks]
        scheduler.apply(planned, StepResult(results, 0.01))
    assert seen == [["0", "2", "3"], ["0", "2", "3"], ["1"], ["1"]]
    assert placed == [A, B]


def request(name: str, adapter: bytes, prompt: int, answer: int, background: bool = False) -> Request:
    tables = [list(range(1 + (prompt + answer) // 4))]
    context, sampling = Context([1] * prompt, adapter=adapter), SamplingParams(max_tokens=answer, temperature=0.0)
    return Request(Key(name, 1, 1), context, prompt, sampling, LAYOUT, tables, background=background)


mixes = st.lists(
    st.tuples(st.sampled_from([b"", A, B, C, b"d", b"e"]), st.integers(1, 60), st.integers(1, 40)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(mixes, st.integers(1, 3), st.sampled_from([b"", A, b"hot"]))
def test_no_request_starves(mix: list[tuple[bytes, int, int]], slots: int, hot: bytes) -> None:
    """Requests of any mix end, although a new request of a hot adapter comes with each step."""
    scheduler = Scheduler(Limits(24, 128, 16, max_adapters=slots))
    left = set()
    for index, (adapter, prompt, answer) in enumerate(mix):
        scheduler.add(request(str(index), adapter, prompt, answer))
        left.add(str(index))
    running = len(left)
    rounds = math.ceil(7 / slots)  # adapters of the mix, and the hot one
    most = rounds * TURN_STEPS * sum(1 + prompt // 4 + answer for _, prompt, answer in mix)
    last_step = dict.fromkeys(left, 0)
    for step in range(most):
        if running < 16:
            scheduler.add(request(f"hot {step}", hot, 8, 20))
            running += 1
        planned = scheduler.plan()
        assert planned is not None
        results = [ChunkResult([Token(1)] if chunk.samples else []) for chunk in planned.chunks]
        decodes = {chunk.key.request_id for chunk in planned.chunks if chunk.follows}
        for name in decodes & left:
            # Nothing but the turns of other adapters comes between two tokens.
            assert step - last_step[name] <= rounds * TURN_STEPS
        last_step |= {chunk.key.request_id: step for chunk in planned.chunks}
        scheduler.apply(planned, StepResult(results, 0.01))
        for event in scheduler.take_events():
            if isinstance(event, Sampled) and event.reason is not None:
                left.discard(event.key.request_id)
                running -= 1
        if not left:
            return
    raise AssertionError(f"{left} did not end within {most} steps")


MODULES = (*ALL, "lm_head")
PROMPTS = [[(7 * index * index + 3 * own) % 97 for index in range(30)] for own in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "lookup", "early"])
def test_requests_with_adapters_get_the_tokens_of_merged_models(drafter: str, tmp_path: Path) -> None:
    reference = write_tiny(tmp_path / "base", "llama")
    wanted, folders = [], []
    for seed in range(3):
        folders.append(write_adapter(tmp_path / f"adapter {seed}", reference, MODULES, seed=seed, size=3.0))
        merged(reference, folders[-1]).save_pretrained(tmp_path / f"merged {seed}")
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    for index, folder in enumerate(("merged 0", "base", "merged 1", "merged 2")):
        loop = Loop(load(tmp_path / folder), 1, "none")
        wanted += loop.run([(PROMPTS[index], sampling)])
        loop.engine.stop()
    model = load_adapted(tmp_path / "base")
    assert model.adapters is not None
    adapters = [model.adapters.read(folder) for folder in folders]
    loop = Loop(model, 2, drafter)
    order = (adapters[0], None, adapters[1], adapters[2])
    found = loop.run([(prompt, sampling) for prompt in PROMPTS], adapters=order)
    loop.engine.stop()
    assert [[token.id for token in own] for own in found] == [[token.id for token in own] for own in wanted]
    assert len({str(own) for own in wanted}) == 4
