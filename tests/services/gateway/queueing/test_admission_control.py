"""Limits of decode workers, and prompts that wait because workers have enough."""

from __future__ import annotations

import dataclasses

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.gateway.queueing.admission_control import DecodeLimits, are_fed, is_fed
from paceline.services.gateway.routing.candidates import Candidate, Need
from tests.services.gateway.routing.test_router import member

OBJECTIVE = 0.1

NEED = Need(100, prompt_tokens=50)


def run(limits: DecodeLimits, seconds: int, *, gap_of_each: float, wanted: int, began: float = 0.0) -> list[int]:
    """Decode with as many requests as are allowed and wanted, and return their number in each second."""
    numbers, running = [], 0
    for second in range(seconds):
        running = min(running, wanted)
        while running < wanted and limits.has_room("worker", running):
            running += 1
        for step in range(10):
            for _ in range(running):
                now = began + second + step / 10
                limits.note("worker", running, gap_of_each * running, OBJECTIVE, 0.99, now)
        numbers.append(running)
        running = max(1, running - 3)  # some end in each second
    return numbers


def test_the_limit_settles_where_gaps_meet_the_objective() -> None:
    numbers = run(DecodeLimits(), 60, gap_of_each=0.005, wanted=64)
    assert numbers[0] == 64
    assert all(14 <= number <= 20 for number in numbers[30:])  # 18 gaps of 5 ms are the objective less its margin


def test_it_grows_again_when_gaps_get_short() -> None:
    limits = DecodeLimits()
    run(limits, 40, gap_of_each=0.005, wanted=64)
    assert run(limits, 60, gap_of_each=0.001, wanted=64, began=40)[-1] == 64


def test_a_worker_that_is_not_full_keeps_its_limit() -> None:
    limits = DecodeLimits()
    run(limits, 40, gap_of_each=0.005, wanted=64)
    run(limits, 40, gap_of_each=0.005, wanted=10, began=40)
    assert not limits.has_room("worker", 25)


def test_without_a_late_token_nothing_is_limited_and_one_request_always_may_run() -> None:
    limits = DecodeLimits()
    assert run(limits, 5, gap_of_each=0.001, wanted=50)[-1] == 50
    run(limits, 60, gap_of_each=1.0, wanted=50, began=5)
    assert limits.has_room("worker", 0)
    limits.keep(set())
    assert limits.has_room("worker", 1000)


def test_a_late_step_now_and_then_lowers_no_limit() -> None:
    limits = DecodeLimits()
    for tick in range(600):  # 10 steps a second, of which one in 300 is late for all 30 requests
        for _ in range(30):
            limits.note("worker", 30, 1.0 if tick % 300 == 299 else 0.02, OBJECTIVE, 0.99, tick / 10)
    assert limits.limited() == []


def worker(role: str, queued: int, rate: float = 0.0, prompts: tuple[int, ...] = (), **fields: object) -> Candidate:
    load = LoadReport(queued_tokens=queued, prefill_tokens_per_second=rate)
    return Candidate(dataclasses.replace(member(role, role), load=load, **fields), prompts=prompts)


def test_prompts_wait_while_every_worker_has_enough_of_them() -> None:
    assert are_fed(NEED, [worker("prefill", 2000), worker("decode", 0)])
    assert not are_fed(NEED, [worker("prefill", 2000), worker("prefill", 100)])
    assert not are_fed(NEED, [worker("prefill", 2000, rate=20_000.0)])  # this is a tenth of a second
    assert are_fed(NEED, [worker("prefill", 500, rate=1000.0)])


def test_decode_workers_count_if_they_compute_the_prompts() -> None:
    assert are_fed(NEED, [worker("decode", 2000)])
    assert not are_fed(NEED, [worker("prefill", 0), worker("decode", 2000)])


def test_a_fleet_that_cannot_take_a_request_is_not_fed() -> None:
    assert not are_fed(NEED, [])
    assert not are_fed(NEED, [worker("prefill", 2000, max_model_len=99)])


def test_only_prompts_that_go_before_a_prompt_feed_its_worker() -> None:
    busy = worker("prefill", 2000, prompts=(1600, 300, 100))
    assert is_fed(busy)
    assert is_fed(busy, 1600)
    assert not is_fed(busy, 200)
    assert is_fed(worker("prefill", 3600, prompts=(1600,)), 200)  # prompts of other gateways may be short ones
    assert is_fed(worker("prefill", 1600, prompts=(1600, *[200] * 7)), 200)  # some of the long one is computed


def test_tokens_before_a_prompt_are_never_more_than_all_nor_negative() -> None:
    half_done = worker("prefill", 700, prompts=(1600, 200))
    assert [half_done.queued_before(tokens) for tokens in (100, 200, 1600)] == [0, 200, 700]
    assert worker("prefill", 100, prompts=(1600, 200)).queued_before(200) == 100
