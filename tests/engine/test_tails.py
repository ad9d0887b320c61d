"""The blocks at the ends of prompts, which are copied before a request writes on in them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.core.context import Tail
from paceline.core.errors import ModelError
from paceline.core.kv_layout import NO_SLOT, make_layout
from paceline.engine.compute_pool import ArenaPool
from paceline.engine.device_pool import DevicePool
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Chunk, ChunkResult, Kept, SpareUnused, StepResult
from tests.engine.toy_host import Host, Wish
from tests.engine.toy_requests import STATES, ToyDevice, make_request, run

SPARE = [901, 902]


def request_of(prompt: int, kept: int, max_tokens: int = 3, **more: object) -> Request:
    return make_request("r", [7] * prompt, max_tokens, STATES, 128, kept_len=kept, spare=list(SPARE), **more)


def chunks_of(request: Request, budget: int = 64) -> list[Chunk]:
    """Compute a request and return its chunks."""
    scheduler, device, chunks = Scheduler(Limits(budget, 4096, 4)), ToyDevice(), []
    scheduler.add(request)
    while step := scheduler.plan():
        chunks += step.chunks
        scheduler.apply(step, device.execute(step))
    return chunks


@pytest.mark.parametrize(
    ("prompt", "kept", "computed", "starts", "copied_before"),
    [
        (70, 70, 0, [0, 35, 70, 71], 70),  # where the answer begins
        (70, 68, 0, [0, 35, 68, 70, 71], 68),  # where a template begins an answer
        (70, 3, 0, [0, 3, 37, 70, 71], 3),
        (70, 69, 69, [69, 70, 71], 69),  # the request itself goes on from there
        (70, 64, 0, [0, 35, 64, 70, 71], None),  # all blocks are full there
        (70, 60, 65, [65, 70, 71], None),  # these tokens are not computed here
        (70, 72, 0, [0, 35, 70, 71], None),  # these tokens are not of the prompt
    ],
)
def test_blocks_are_copied_before_the_chunk_that_writes_on_in_them(
    prompt: int, kept: int, computed: int, starts: list[int], copied_before: int | None
) -> None:
    request = request_of(prompt, kept if kept <= prompt else 0, computed_len=computed)
    tables = [list(table) for table in request.tables]
    chunks = chunks_of(request)
    assert [chunk.start for chunk in chunks] == starts
    assert [chunk.start for chunk in chunks if chunk.copies] == ([] if copied_before is None else [copied_before])
    if copied_before is not None:
        (copies,) = [chunk.copies for chunk in chunks if chunk.copies]
        ends = [divmod(copied_before, group.block_tokens) for group in STATES.groups]
        pairs = [(table[block], own) for (block, rest), table, own in zip(ends, tables, SPARE) if rest]
        assert list(copies) == pairs


def test_copies_are_told_of_when_they_are_made() -> None:
    scheduler, device, request = Scheduler(Limits(64, 4096, 4)), ToyDevice(), request_of(20, 20)
    scheduler.add(request)
    prompt = scheduler.plan()
    answer = scheduler.plan()  # launched before the results of the first step have come
    assert prompt is not None
    assert answer is not None
    assert [len(chunk.copies) for step in (prompt, answer) for chunk in step.chunks] == [0, 2]
    told = []
    for step in (prompt, answer):
        scheduler.apply(step, device.execute(step))
        told.append([event for event in scheduler.take_events() if isinstance(event, Kept)])
    assert told == [[], [Kept(request.key, Tail(20, request.context.name(STATES.fingerprint, 20)), copied=True)]]


def test_the_ends_of_prompt_and_answer_are_kept() -> None:
    scheduler = Scheduler(Limits(64, 4096, 4))
    scheduler.add(request_of(20, 18, max_tokens=5))
    kept = [event for event in run(scheduler) if isinstance(event, Kept)]
    assert [(event.tail.length, event.copied) for event in kept] == [(18, True), (24, False)]


def test_no_copies_of_a_step_that_fails_are_kept() -> None:
    scheduler = Scheduler(Limits(64, 4096, 4))
    scheduler.add(request_of(20, 18))
    while (step := scheduler.plan()) is not None:
        failure = ModelError("NaN") if step.chunks[0].start == 0 else None
        scheduler.apply(step, StepResult([ChunkResult(failure=failure)]))
    assert not [event for event in scheduler.take_events() if isinstance(event, Kept)]


@pytest.mark.parametrize("drafter_len", [17, 18])
@pytest.mark.parametrize("kv_pool", ["arena", "device"])
def test_copies_are_kept_only_with_the_kv_of_a_draft_model(drafter_len: int, kv_pool: str) -> None:
    shapes = [group.shape for group in STATES.groups]
    layout = make_layout((*shapes, shapes[1].of_drafter(3)), 4, "test")
    pool = DevicePool(layout, 32) if kv_pool == "device" else ArenaPool()
    scheduler, device = Scheduler(Limits(64, 4096, 4), pool=pool), ToyDevice()
    request = make_request("r", [7] * 20, 4, layout, 128, kept_len=18, spare=[*SPARE, 903])
    scheduler.add(request)
    events: list[object] = []
    while len(request.token_ids) < 23 and (step := scheduler.plan()):
        result = device.execute(step)
        scheduler.apply(step, replace(result, drafter_lengths=[drafter_len] * len(step.chunks)))
        events += scheduler.take_events()
        for copies in pool.take_copies():
            events += pool.finish_copies(copies, 0.0)
    if (counts := pool.counts()) is not None:  # the slots of the copies are free again
        assert counts.held == sum(slot != NO_SLOT for table in pool.tables(request) for slot in table)
    assert any(isinstance(event, Kept) and event.copied for event in events) == (drafter_len == 18)
    assert any(isinstance(event, SpareUnused) for event in events) == (drafter_len == 17)


@pytest.mark.parametrize(
    ("kept", "computed", "is_unused"),
    [(64, 0, True), (60, 65, True), (70, 0, False), (69, 69, False)],
    ids=["all blocks are full there", "computed elsewhere", "copied", "copied at once"],
)
def test_spare_blocks_are_given_up_when_no_copy_can_be_made_any_more(kept: int, computed: int, is_unused: bool) -> None:
    scheduler, request = Scheduler(Limits(64, 4096, 4)), request_of(70, kept, max_tokens=9, computed_len=computed)
    scheduler.add(request)
    events, device = list[object](), ToyDevice()
    while len(request.token_ids) < 75:  # it still runs
        step = scheduler.plan()
        assert step is not None
        scheduler.apply(step, device.execute(step))
        events += scheduler.take_events()
    assert [event for event in events if isinstance(event, SpareUnused)] == [SpareUnused(request.key)] * is_unused


@pytest.mark.parametrize("seed", range(5))
def test_the_end_of_a_prompt_is_kept_before_others_write_there(seed: int) -> None:
    rng = random.Random(seed)
    host = Host(STATES, 99, 99, Limits(32, 4096, 4, 2), rng)
    lengths = [rng.randint(1, 70) for _ in range(4)]
    wishes = [
        Wish([kind] * 70, 20, adopted=kind == 1, leaves=kind == 0, kept=kept) for kind, kept in enumerate(lengths)
    ]
    wishes += [Wish([9] * 70, 20, adopted=adopted, leaves=False, kept=70) for adopted in (False, True)]
    host.run(wishes)
    # The adopted request has computed the tokens before its last one elsewhere.
    kept = {str(kind) for kind, length in enumerate(lengths) if length % 32 and (kind != 1 or length >= 69)}
    assert host.kept == kept | {"4", "5"}


def test_the_slots_of_copies_come_back_if_their_request_leaves_first() -> None:
    pool, device = DevicePool(STATES, 16), ToyDevice()
    scheduler, request = Scheduler(Limits(64, 4096, 4), pool=pool), request_of(20, 18)
    scheduler.add(request)
    begin = scheduler.plan()
    end = scheduler.plan()
    assert begin is not None
    assert end is not None
    assert end.chunks[0].copies
    scheduler.remove(request.key)
    for step in (begin, end):
        scheduler.apply(step, device.execute(step))
    counts = pool.counts()
    assert counts is not None
    assert counts.free == counts.total
