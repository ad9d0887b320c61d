"""Turns of prefill and decode, with a clock that moves only while somebody sleeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.turns import PAGE_BYTES, POOL_SHARE, DecodeTurns, PoolTurns, PrefillTurns

MS = 1_000_000
TARGET = 0.05


class Clock:
    """A clock in nanoseconds. Sleeping runs the `events` that are due meanwhile."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.events: list[tuple[int, Callable[[], None]]] = []

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pass_ms(seconds * 1000)

    def pass_ms(self, ms: float) -> None:
        self.now += int(ms * MS)
        due = [act for at, act in self.events if at <= self.now]
        self.events = [(at, act) for at, act in self.events if at > self.now]
        for act in due:
            act()

    def after(self, ms: float, act: Callable[[], None]) -> None:
        self.events.append((self.now + int(ms * MS), act))

    def waited(self, wait: Callable[[], None]) -> float:
        """Return the milliseconds that a wait takes."""
        began = self.now
        wait()
        return (self.now - began) / MS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def page() -> memoryview:
    return memoryview(bytearray(PAGE_BYTES))


@pytest.fixture
def decode(page: memoryview, clock: Clock) -> DecodeTurns:
    return DecodeTurns(page, 7, TARGET, clock, clock.sleep)


@pytest.fixture
def prefill(page: memoryview, clock: Clock) -> PrefillTurns:
    return PrefillTurns(page, clock, clock.sleep)


def leave_turn(clock: Clock, decode: DecodeTurns, prefill: PrefillTurns, ms: float = 20) -> None:
    """Let decode compute for `ms` milliseconds and leave the rest of its target to prefill, which is waiting."""
    decode.begin()
    clock.pass_ms(ms)
    prefill._may_compute(clock())
    decode.end()


def test_who_is_alone_never_waits(clock: Clock, decode: DecodeTurns, prefill: PrefillTurns) -> None:
    for turns in (decode, prefill):
        for _ in range(3):
            assert clock.waited(turns.begin) == 0
            clock.pass_ms(10)
            turns.end()
        clock.pass_ms(100)


def test_prefill_waits_for_the_end_of_a_step(clock: Clock, decode: DecodeTurns, prefill: PrefillTurns) -> None:
    decode.begin()
    clock.after(20, decode.end)
    assert 20 <= clock.waited(prefill.begin) <= 22


def test_decode_that_has_more_to_do_leaves_the_rest_of_its_target(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    decode.begin()
    clock.pass_ms(20)
    assert not prefill._may_compute(clock())
    decode.end()
    clock.after(20, lambda: prefill.begin())  # the next operation does not have to wait
    assert 29 <= clock.waited(decode.begin) <= 31
    assert not prefill._may_compute(clock())


def test_the_next_step_may_take_as_long_as_the_longest_of_the_last_ones(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    leave_turn(clock, decode, prefill, 30)
    for _ in range(7):
        leave_turn(clock, decode, prefill, 10)
        assert clock.waited(decode.begin) == pytest.approx(20, abs=1)
    leave_turn(clock, decode, prefill, 10)
    assert clock.waited(decode.begin) == pytest.approx(40, abs=1)


def test_decode_is_told_that_it_has_to_wait_and_can_be_woken_early(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    decode.begin()
    assert decode.end() is False
    assert decode.wait(0.004) == 0
    decode.begin()
    clock.pass_ms(20)
    prefill._may_compute(clock())
    assert decode.end() is True
    assert 25 <= clock.waited(lambda: decode.wait(0.004)) <= 27
    assert 0.0035 <= decode.wait(0.004) <= 0.004
    assert 3 <= clock.waited(decode.begin) <= 5


def test_decode_goes_on_when_prefill_is_done(clock: Clock, decode: DecodeTurns, prefill: PrefillTurns) -> None:
    decode.begin()
    clock.after(10, decode.end)
    prefill.begin()
    clock.after(5, prefill.end)
    assert 6 <= clock.waited(decode.begin) <= 7
    decode.end()
    assert clock.waited(decode.begin) == 0


def test_long_steps_leave_prefill_its_share(clock: Clock, decode: DecodeTurns, prefill: PrefillTurns) -> None:
    leave_turn(clock, decode, prefill, 200)
    for ms in (30, 60, 90):  # prefill's next operations
        clock.after(ms, prefill.begin)
    assert 99 <= clock.waited(decode.begin) <= 101


def test_without_a_target_prefill_gets_more_than_half_of_a_slow_machine(
    page: memoryview, clock: Clock, prefill: PrefillTurns
) -> None:
    decode = DecodeTurns(page, 7, None, clock, clock.sleep)
    for step_ms, left_ms in ((8, 20), (40, 60)):
        for _ in range(8):
            leave_turn(clock, decode, prefill, step_ms)
            for ms in range(0, 100, 10):  # prefill's next operations
                clock.after(ms, lambda: prefill._may_compute(clock()))
            waited = clock.waited(decode.begin)
            clock.pass_ms(200)
        assert waited == pytest.approx(left_ms, abs=1)


def test_a_backlog_of_prompts_gets_more_of_a_slow_machine(
    page: memoryview, clock: Clock, prefill: PrefillTurns
) -> None:
    """Prefill wants the cores without a pause. After two seconds, it gets three times as long as a step of decoding."""
    decode = DecodeTurns(page, 7, None, clock, clock.sleep)
    left: list[float] = []
    for _ in range(40):
        leave_turn(clock, decode, prefill, 40)
        for ms in range(0, 200, 10):
            clock.after(ms, lambda: prefill._may_compute(clock()))
        left.append(round(clock.waited(decode.begin)))
    assert left[:20] == [60] * 20
    assert left[-10:] == [120] * 10
    clock.pass_ms(200)
    leave_turn(clock, decode, prefill, 40)  # the backlog was computed meanwhile
    clock.after(1, lambda: prefill._may_compute(clock()))
    assert clock.waited(decode.begin) == pytest.approx(51, abs=2)  # until prefill's claim expires


def test_prompts_are_no_backlog_because_decode_was_idle(page: memoryview, clock: Clock, prefill: PrefillTurns) -> None:
    """A decode worker whose first step in a minute comes with a burst of prompts leaves them its usual share."""
    decode = DecodeTurns(page, 7, None, clock, clock.sleep)
    leave_turn(clock, decode, prefill, 40)
    clock.pass_ms(60_000)
    for ms in range(0, 400, 10):
        clock.after(ms, lambda: prefill._may_compute(clock()))
    clock.pass_ms(1)
    decode.begin()
    clock.pass_ms(40)
    decode.end()
    assert clock.waited(decode.begin) == pytest.approx(60, abs=1)


def test_a_given_target_is_kept_while_there_is_a_backlog(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    for _ in range(40):
        leave_turn(clock, decode, prefill, 40)
        for ms in range(0, 200, 10):
            clock.after(ms, lambda: prefill._may_compute(clock()))
        assert clock.waited(decode.begin) == pytest.approx(20, abs=1)


def test_one_slow_step_does_not_change_the_share_of_prefill(
    page: memoryview, clock: Clock, prefill: PrefillTurns
) -> None:
    decode = DecodeTurns(page, 7, None, clock, clock.sleep)
    for step_ms in (20, 20, 20, 200):
        leave_turn(clock, decode, prefill, step_ms)
        for ms in range(0, 100, 10):
            clock.after(ms, lambda: prefill._may_compute(clock()))
        assert clock.waited(decode.begin) == pytest.approx(30, abs=1)
        clock.pass_ms(200)


def test_a_piece_of_an_encoder_is_no_step(clock: Clock, decode: DecodeTurns, prefill: PrefillTurns) -> None:
    leave_turn(clock, decode, prefill, 20)
    assert clock.waited(decode.begin) == pytest.approx(30, abs=1)
    for piece_ms, left_ms in ((4, 2), (40, 20)):
        clock.pass_ms(piece_ms)
        prefill._may_compute(clock())
        decode.end_piece()
        assert clock.waited(decode.begin) == pytest.approx(left_ms, abs=1), "prefill has its share of the piece"
    clock.pass_ms(20)
    prefill._may_compute(clock())
    decode.end()
    assert clock.waited(decode.begin) == pytest.approx(30, abs=1), "as before the pieces"


def test_decode_goes_before_pieces_of_an_encoder_on_a_prefill_worker(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    prefill.begin()
    clock.pass_ms(4)
    prefill.end_piece()
    decode.begin()
    clock.after(20, decode.end)
    assert 20 <= clock.waited(prefill.begin) <= 22


def test_all_decode_workers_leave_the_same_time(
    page: memoryview, clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    other = DecodeTurns(page, 8, TARGET, clock, clock.sleep)
    decode.begin()
    other.begin()
    clock.pass_ms(20)
    prefill._may_compute(clock())
    decode.end()
    clock.pass_ms(10)
    assert prefill._may_compute(clock()), "while the other one still computes"
    other.end()
    assert 19 <= clock.waited(other.begin) <= 21


def test_the_dead_are_forgotten(page: memoryview, clock: Clock, prefill: PrefillTurns) -> None:
    decode = DecodeTurns(page, 7, 0.2, clock, clock.sleep)
    decode.begin()  # the decode worker is killed now
    assert 49 <= clock.waited(prefill.begin) <= 51
    decode.begin()  # another decode worker has replaced it
    decode.end()  # prefill may compute for 200 ms, and is killed now
    assert 49 <= clock.waited(decode.begin) <= 51


def test_decode_plans_when_what_prefill_has_finished_was_handed_over(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    leave_turn(clock, decode, prefill)
    assert decode.expecting() == 0
    clock.after(25, lambda: prefill.end(hands_over=True))
    clock.after(25.5, prefill.begin)  # prefill goes on
    clock.after(30.5, decode.received)
    assert 31 <= clock.waited(lambda: decode.wait(0.004)) <= 33
    assert decode.expecting() == 0
    assert clock.waited(decode.begin) == 0


def test_decode_waits_for_what_is_handed_over_no_longer_than_that_takes(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    leave_turn(clock, decode, prefill)
    for ms in range(20, 60, 4):  # as with many prefill workers, of whose blocks none come to this decode worker
        clock.after(ms, lambda: prefill.end(hands_over=True))
        clock.after(ms + 0.5, lambda: prefill._may_compute(clock()))
    assert 37 <= clock.waited(lambda: decode.wait(0.004)) <= 39
    assert 0.003 < decode.expecting() <= 0.008


def test_decode_does_not_wait_for_a_request_while_nobody_computes(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns
) -> None:
    leave_turn(clock, decode, prefill)
    clock.after(10, lambda: prefill.end(hands_over=True))
    assert 10 <= clock.waited(lambda: decode.wait(0.004)) <= 12
    assert 0.006 < decode.expecting() <= 0.008


@pytest.fixture
def pool(page: memoryview, clock: Clock) -> PoolTurns:
    return PoolTurns(page, clock, clock.sleep)


def test_a_pool_worker_gets_a_small_share_of_decoding(clock: Clock, decode: DecodeTurns, pool: PoolTurns) -> None:
    assert clock.waited(pool.begin) == 0
    pool.end()
    for _ in range(3):
        leave_turn(clock, decode, pool)
        assert clock.waited(decode.begin) == pytest.approx(POOL_SHARE * 20, abs=0.5)


def test_prompts_get_their_whole_share_although_a_pool_worker_is_waiting(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns, pool: PoolTurns
) -> None:
    leave_turn(clock, decode, prefill)
    alone = clock.waited(decode.begin)
    pool._may_compute(clock())
    leave_turn(clock, decode, prefill)
    assert clock.waited(decode.begin) == alone > 10


def test_a_pool_worker_that_has_ended_leaves_prompts_their_share(
    clock: Clock, decode: DecodeTurns, prefill: PrefillTurns, pool: PoolTurns
) -> None:
    pool.begin()
    pool.end()
    clock.pass_ms(5)
    leave_turn(clock, decode, prefill)
    assert clock.waited(decode.begin) > 10
