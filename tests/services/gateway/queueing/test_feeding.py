from __future__ import annotations

import dataclasses

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.gateway.queueing.feeding import are_fed, is_fed
from paceline.services.gateway.routing.candidates import Candidate, Need
from tests.services.gateway.routing.test_router import member

NEED = Need(100, prompt_tokens=50)


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
