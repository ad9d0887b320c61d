"""The limit of a worker whose gaps grow with the number of its requests."""

from __future__ import annotations

from paceline.services.gateway.queueing.decode_limits import DecodeLimits

OBJECTIVE = 0.1


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
