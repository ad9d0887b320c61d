"""The scheduler's steps: their chunks, their results, and their statistics."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from paceline.core.types import FinishReason, Key, SamplingParams
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import ChunkResult, Computed, Removed, Sampled, Step, StepResult
from tests.engine.toy_requests import ToyDevice, make_request, next_token, run


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    device = ToyDevice()
    scheduler.add(make_request("a", list(range(80)), 1))
    lengths = []
    while step := scheduler.plan():
        lengths.append(step.chunks[0].length)
        scheduler.apply(step, device.execute(step))
    assert lengths == [32, 24, 24]


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ((20, 20, 20), [20, 20, 20]),
        ((3, 32, 32), [3 + 13, 19, 32]),
        ((4, 4, 4, 4, 4), [16, 4]),
        ((40, 10), [10 + 6, 16, 18]),
    ],
)
def test_what_is_half_full_of_prompts_takes_no_further_one(lengths: tuple[int, ...], steps: list[int]) -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    device = ToyDevice()
    for number, length in enumerate(lengths):
        scheduler.add(make_request(str(number), list(range(length)), 1))
    planned = []
    while step := scheduler.plan():
        planned.append(sum(chunk.length for chunk in step.chunks))
        scheduler.apply(step, device.execute(step))
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
    stats = [request.stats for request in requests]
    assert sum(own.drafts for own in stats) == scheduler.stats.drafts > 0
    assert sum(own.draft_tokens for own in stats) == scheduler.stats.draft_tokens
    assert all(1 < own.steps <= 9 for own in stats)


def test_decoding_comes_before_prompts() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    scheduler.add(make_request("prompt", list(range(100)), 1))
    scheduler.add(make_request("decoding", list(range(20)), 10, computed_len=19))
    step = scheduler.plan()
    assert step is not None
    assert [(chunk.key.request_id, chunk.length) for chunk in step.chunks] == [("decoding", 1), ("prompt", 31)]


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


def test_no_more_tokens_are_verified_than_the_request_may_still_get() -> None:
    scheduler = Scheduler(Limits(64, 4096, 16, max_drafts=4), Speculation(4, adaptive=False))
    scheduler.add(make_request("a", [1, 2, 3, 4], 8, computed_len=3))
    device, lengths = ToyDevice(accept=lambda most: min(most, 2)), []
    while step := scheduler.plan():
        lengths += [chunk.length for chunk in step.chunks]
        scheduler.apply(step, device.execute(step))
    assert max(lengths) == 5  # a token and four drafts
    assert lengths[-1] <= 2  # at most two of eight tokens are missing then


def test_what_was_not_drafted_is_not_counted_as_computed() -> None:
    scheduler = Scheduler(Limits(64, 4096, 4, 4), Speculation(4, adaptive=False))
    device = ToyDevice(accept=lambda most: min(most, 1))
    scheduler.add(make_request("a", [1, 2, 3, 4], 50))
    while step := scheduler.plan():
        result = device.execute(step)
        scheduler.apply(step, StepResult([replace(chunk, drafted=0) for chunk in result.chunks]))
    assert scheduler.stats.computed_tokens == 4 + 49


def iteration_tokens(scheduler: Scheduler) -> tuple[float, float]:
    """Return the sum and the count of the histogram of tokens by step."""
    found = {sample.suffix: sample.value for sample in scheduler.stats.iteration_tokens.samples()}
    return found["_sum"], found["_count"]


@pytest.mark.parametrize("drafts", [0, 4])
def test_the_tokens_of_steps_are_those_of_prompts_and_answers(drafts: int) -> None:
    limits = Limits(32, 4096, 16, drafts)
    alone = Scheduler(limits, Speculation(drafts, adaptive=False))
    alone.add(make_request("a", list(range(40)), 10))
    run(alone)
    # The prompt takes two steps, and the second one gives a token.
    assert iteration_tokens(alone) == (40 + 10, 1 + 10 if not drafts else 4)

    prefill, decode = Scheduler(limits), Scheduler(limits)
    prefill.add(make_request("a", list(range(40)), 10, only_first_token=True))
    adopted = make_request("a", list(range(40)), 10, computed_len=40)
    adopted.token_ids.append(7)
    decode.add(adopted)
    for scheduler in (prefill, decode):
        run(scheduler)
    assert iteration_tokens(prefill) == (40 + 1, 2)
    assert iteration_tokens(decode) == (
        9,
        9 if not drafts else 5,
    )  # the first was counted before


def test_the_time_of_a_step_counts_for_each_request_in_it() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    device = ToyDevice()
    scheduler.add(make_request("prompt", list(range(40)), 1))
    for name in "ab":  # as a decode worker adopts them: the first token is known, and nothing is computed after it
        adopted = make_request(name, list(range(20)), 3, computed_len=20)
        adopted.token_ids.append(7)
        scheduler.add(adopted)
    for seconds, model_seconds in ((4.0, 3.0), (16.0, 8.0)):
        step = scheduler.plan()
        assert step is not None
        scheduler.apply(step, replace(device.execute(step), seconds=seconds, model_seconds=model_seconds))
    stats = scheduler.stats
    assert (stats.prefill_model_seconds, stats.prefill_other_seconds) == (11, 9)
    assert (stats.decode_model_seconds, stats.decode_other_seconds) == (22, 18)


def test_how_fast_prompts_are_computed_is_learned_of_large_steps() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=256, max_model_len=4096, max_seqs=16))
    device = ToyDevice()
    scheduler.add(make_request("prompt", list(range(700)), 3))
    speeds = []
    for seconds in (2.0, 1.0, 0.1, 5.0):  # chunks of 256, 222 and 222 tokens, and one sampled token
        step = scheduler.plan()
        assert step is not None
        scheduler.apply(step, replace(device.execute(step), seconds=seconds))
        speeds.append(scheduler.stats.prefill_tokens_per_second)
    assert speeds == [128, 139.75, 139.75 + (2220 - 139.75) / 8, speeds[2]]


def test_a_step_behind_the_end_of_a_request_is_no_time_of_it() -> None:
    scheduler = Scheduler(Limits(max_batched_tokens=32, max_model_len=4096, max_seqs=16))
    device = ToyDevice()
    scheduler.add(make_request("a", list(range(20)), 5))
    first = scheduler.plan()
    surplus = scheduler.plan()
    assert first is not None
    assert surplus is not None
    scheduler.apply(first, device.execute(first))
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


def test_remove_is_confirmed_even_for_strangers() -> None:
    scheduler = Scheduler(Limits(16, 4096, max_seqs=16))
    request = make_request("a", list(range(4)), 30)
    scheduler.add(request)
    scheduler.remove(request.key)
    scheduler.remove(Key("nobody", 1, 1))
    assert scheduler.take_events() == [Removed(request.key), Removed(Key("nobody", 1, 1))]
    assert scheduler.plan() is None
