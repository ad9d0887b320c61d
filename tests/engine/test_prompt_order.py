"""How prompts share steps: who goes first, how full steps are, and that no prompt starves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.prompt_order import AGING, LONG_SECONDS, RECENT_STEPS, Arrival, PromptOrder, is_long, piece_of

ROOM = 64
SPEED = 100.0
"""Tokens per second of prompts."""


@dataclass(eq=False)
class Waiting:
    name: str
    left_len: int
    ttft_seconds: float | None = None
    background: bool = False
    blocked: bool = False
    prompt_arrival: Arrival | None = None


class Worker:
    """Plans steps of prompts, which arrive whenever the test says so."""

    def __init__(self, room: int = ROOM) -> None:
        self.order = PromptOrder(room)
        self.room = room
        self.waiting: list[Waiting] = []
        self.ended: list[Waiting] = []
        self.tokens = 0
        self.now = 0.0

    def add(self, *prompts: Waiting) -> None:
        self.waiting += prompts

    def step(self, room: int | None = None) -> list[tuple[str, int]]:
        """Plan a step, and return its prompts and their tokens."""
        chunks: list[tuple[str, int]] = []

        def take(prompt: Waiting, tokens: int) -> int:
            length = 0 if prompt.blocked else piece_of(prompt.left_len, tokens)
            if length:
                prompt.left_len -= length
                chunks.append((prompt.name, length))
            return length

        self.order.share(self.waiting, self.room if room is None else room, SPEED, take, self.now)
        self.ended += [prompt for prompt in self.waiting if prompt.left_len == 0]
        self.waiting = [prompt for prompt in self.waiting if prompt.left_len]
        tokens = sum(tokens for _, tokens in chunks)
        self.tokens += tokens
        self.now += tokens / SPEED
        return chunks

    def run(self) -> list[str]:
        """Plan steps until nothing waits, and return the names of the prompts in the order of their ends."""
        while self.waiting:
            assert self.step()
        return [prompt.name for prompt in self.ended]


def idle(worker: Worker) -> None:
    """Compute so many tokens that no arrival is recent any more."""
    worker.add(Waiting("earlier", (RECENT_STEPS + 2) * worker.room))
    worker.run()
    worker.ended.clear()


def test_the_prompt_with_the_least_left_goes_first() -> None:
    worker = Worker()
    worker.add(Waiting("long", 500), Waiting("short", 40), Waiting("middle", 90))
    assert worker.run() == ["short", "middle", "long"]


def test_what_is_computed_of_a_prompt_counts() -> None:
    worker = Worker()
    worker.add(Waiting("begun", 130))
    worker.step()
    worker.add(Waiting("new", 80))
    assert worker.waiting[0].left_len == 66
    assert worker.run() == ["begun", "new"]


def test_equal_prompts_do_not_take_turns() -> None:
    worker = Worker()
    worker.add(*(Waiting(name, 200) for name in "abc"))
    names = [name for _ in range(12) for name, _ in worker.step()]
    assert names == sorted(names)


def test_a_prompt_is_not_overtaken_for_more_than_its_patience() -> None:
    worker = Worker()
    old = Waiting("old", 100)
    worker.add(old)
    others = 0
    while old.left_len:
        worker.add(Waiting("new", 32))
        others += sum(tokens for name, tokens in worker.step() if name == "new")
    assert others <= AGING * 100 + ROOM


def wait_for(worker: Worker, old: Waiting) -> None:
    """Let short prompts overtake a prompt until it has waited long enough to go first."""
    worker.add(old)
    while worker.tokens < AGING * old.left_len:
        worker.add(Waiting("new", 32))
        worker.step()
    worker.waiting = [old]


def test_a_prompt_that_has_waited_takes_turns_with_short_ones() -> None:
    """Otherwise each short prompt would wait for all steps of the long one."""
    worker = Worker()
    wait_for(worker, Waiting("old", 1000))
    steps = []
    for _ in range(8):
        worker.add(Waiting("new", 32))
        steps += worker.step()
    assert steps == [("new", 32), ("old", 32)] * 4


def test_a_prompt_of_several_steps_does_not_take_turns_with_one_that_has_waited() -> None:
    worker = Worker()
    wait_for(worker, Waiting("old", 300))
    worker.add(Waiting("newer", 200))
    assert {name for _ in range(4) for name, _ in worker.step()} == {"old"}


def test_a_prompt_whose_objective_is_near_takes_no_turns() -> None:
    worker = Worker()
    worker.add(Waiting("wanted", 400, ttft_seconds=400 / SPEED), Waiting("short", 20))
    assert {name for _ in range(6) for name, _ in worker.step()} == {"wanted"}


def test_an_objective_makes_a_prompt_more_urgent() -> None:
    worker = Worker()
    worker.add(Waiting("wanted", 400, ttft_seconds=400 / SPEED), Waiting("short", 40))
    assert worker.run() == ["wanted", "short"]
    worker = Worker()
    worker.add(Waiting("patient", 400, ttft_seconds=100.0), Waiting("short", 40))
    assert worker.run() == ["short", "patient"]


def test_a_client_that_has_tokens_already_does_not_wait_for_newcomers() -> None:
    worker = Worker()
    worker.add(Waiting("lost its worker", 400, ttft_seconds=0.0), Waiting("short", 40))
    assert worker.run() == ["lost its worker", "short"]


def test_the_background_comes_after_all_others() -> None:
    worker = Worker()
    worker.add(Waiting("batch", 20, background=True), Waiting("long", 500))
    while worker.step()[0][0] != "batch":
        worker.add(Waiting("new", 40)) if worker.tokens < 2000 else None
    assert [prompt.name for prompt in worker.ended if prompt.name == "long"]
    assert not [prompt for prompt in worker.waiting if not prompt.background]


def test_others_go_on_while_a_prompt_cannot() -> None:
    worker = Worker()
    worker.add(Waiting("waits for an image", 40, blocked=True), Waiting("long", 300))
    assert {name for _ in range(4) for name, _ in worker.step()} == {"long"}


def test_a_step_is_filled_by_a_prompt_if_no_other_is_expected() -> None:
    worker = Worker()
    idle(worker)
    worker.add(Waiting("alone", 200))
    assert [worker.step() for _ in range(4)] == [[("alone", size)] for size in (64, 64, 36, 36)]


def test_a_step_is_half_filled_by_a_prompt_if_another_one_came_lately() -> None:
    worker = Worker()
    worker.add(Waiting("first", 20))
    worker.run()
    worker.add(Waiting("long", 200))
    assert worker.step() == [("long", 32)]


def test_what_came_long_ago_is_not_expected_again_although_the_worker_was_idle() -> None:
    for seconds, size in ((0.9, 32), (1.1, 64)):
        worker = Worker()
        worker.add(Waiting("first", 20))
        worker.run()
        worker.now += seconds * RECENT_STEPS * ROOM / SPEED
        worker.add(Waiting("long", 200))
        assert worker.step() == [("long", size)]


@pytest.mark.parametrize(("came", "waits", "size"), [(True, False, 64), (True, True, 64), (False, True, 32)])
def test_only_prompts_of_clients_are_expected(came: bool, waits: bool, size: int) -> None:
    """A prompt of the background goes before no other, and each prompt of a client goes before the background."""
    worker = Worker()
    worker.add(*(Waiting("short", 20, background=came) for _ in range(4)))
    worker.run()
    worker.add(Waiting("long", 200, background=waits))
    assert worker.step() == [("long", size)]


def test_many_arrivals_of_the_background_hide_none_of_a_client() -> None:
    worker = Worker(room=512)
    worker.add(Waiting("client's", 20), *(Waiting("line", 1, background=True) for _ in range(100)))
    worker.run()
    worker.add(Waiting("long", 2000))
    assert worker.step() == [("long", 256)]


def test_the_background_makes_room_for_clients_whose_prompts_are_longer() -> None:
    worker = Worker()
    worker.add(Waiting("client's", 400))
    worker.run()
    worker.add(Waiting("line", 100, background=True))
    assert worker.step() == [("line", 32)]


def test_prompts_that_would_wait_for_this_one_get_no_part_of_its_steps() -> None:
    """Half steps would only make all of them later."""
    worker = Worker()
    worker.add(*(Waiting(name, 256) for name in "abc"))
    assert [worker.step() for _ in range(5)] == [[("a", 64)]] * 4 + [[("b", 64)]]
    worker.add(Waiting("longer", 300))
    assert worker.step() == [("b", 64)]


def test_a_prompt_that_fits_into_a_step_is_not_cut() -> None:
    worker = Worker()
    worker.add(Waiting("a", 60), Waiting("b", 60))
    assert [worker.step(), worker.step()] == [[("a", 60)], [("b", 60)]]


def test_a_first_token_does_not_wait_for_more_than_half_a_step() -> None:
    worker = Worker()
    worker.add(Waiting("short", 10), Waiting("long", 500))
    assert worker.step() == [("short", 10), ("long", 22)]


@pytest.mark.parametrize("room", [0, -3])
def test_without_room_nothing_is_planned(room: int) -> None:
    worker = Worker()
    worker.add(Waiting("a", 10))
    assert worker.step(room) == []


def test_pieces_have_about_equal_sizes() -> None:
    assert [piece_of(left, 64) for left in (1, 64, 65, 127, 128, 500)] == [1, 64, 33, 64, 64, 64]


def test_a_step_is_long_if_it_takes_long_at_the_measured_rate() -> None:
    assert is_long(300, 10_000.0)
    assert not is_long(int(LONG_SECONDS * 10_000), 10_000.0)
    assert not is_long(300, 0.0)


prompts = st.lists(
    st.builds(
        Waiting,
        st.just(""),
        st.integers(1, 400),
        st.sampled_from([None, None, 0.0, 0.3, 20.0]),
        st.booleans(),
    ),
    max_size=4,
)


@given(st.lists(prompts, min_size=1, max_size=30), st.integers(1, 400))
def test_no_prompt_starves(arrivals: Sequence[list[Waiting]], length: int) -> None:
    """Whatever arrives between steps, a prompt gets half of the tokens after its patience is over and the prompts are
    computed that arrived before that."""
    worker, watched = Worker(), Waiting("watched", length)
    worker.add(watched)
    ahead = 0
    for step in range(100_000):
        newcomers = arrivals[step % len(arrivals)] if worker.tokens < 3 * AGING * 400 else []
        newcomers = [Waiting("", each.left_len, each.ttft_seconds, each.background) for each in newcomers]
        if worker.tokens <= AGING * length:
            ahead += sum(each.left_len for each in newcomers if not each.background)
        worker.add(*newcomers)
        assert worker.step()
        if watched.left_len == 0:
            break
    assert watched.left_len == 0
    assert worker.tokens <= AGING * length + 2 * (ahead + length) + 2 * ROOM


@given(st.lists(prompts, max_size=12), st.integers(1, 100))
def test_steps_keep_the_order(arrivals: Sequence[list[Waiting]], room: int) -> None:
    """Each step fits, computes something, and lets no equal prompt go before an earlier one, nor the background before
    any other prompt."""
    worker, everyone = Worker(room), []
    for newcomers in [*arrivals, *[[]] * 20]:
        for each in newcomers:
            each.name = str(len(everyone))
            everyone.append((each, each.left_len))
        worker.add(*newcomers)
        chunks = worker.step()
        assert bool(chunks) == bool(worker.waiting or chunks)
        assert sum(tokens for _, tokens in chunks) <= room
        urgent = {each.name for each, _ in everyone if not each.background}
        if any(not each.background and each.name not in dict(chunks) for each in worker.waiting):
            assert set(dict(chunks)) <= urgent
    for number, (early, length) in enumerate(everyone):
        for late, other in everyone[number + 1 :]:
            alike = (length, early.ttft_seconds, early.background) == (other, late.ttft_seconds, late.background)
            if alike and late in worker.ended:
                assert early in worker.ended
                assert worker.ended.index(early) < worker.ended.index(late)
