from __future__ import annotations

import asyncio
import time

import pytest

from paceline.core.errors import BusyError
from paceline.services.gateway.http.errors import NoRoomError
from paceline.services.gateway.queueing.admission_queue import AdmissionQueue
from paceline.services.gateway.queueing.fair_order import Demand, QueueClaim
from paceline.services.gateway.queueing.queue_state import HELD, Held


class Room:
    """A number of places that requests take. There are none at first."""

    def __init__(self) -> None:
        self.places = 0
        self.taken_by: list[str] = []

    def ask(self, name: str):
        async def attempt() -> str | None:
            await asyncio.sleep(0)
            if self.places == 0:
                return None
            self.places -= 1
            self.taken_by.append(name)
            return name

        return attempt


async def queue_up(line: AdmissionQueue, room: Room, *names: str, **kind: object) -> list[asyncio.Task[str]]:
    tasks = []
    for name in names:
        length = len(line)
        tasks.append(asyncio.create_task(line.admit(room.ask(name), QueueClaim(**kind))))
        while len(line) == length:  # no signal tells that the request is in the queue
            await asyncio.sleep(0)
    return tasks


async def serve_one_by_one(line: AdmissionQueue, room: Room, tasks: list[asyncio.Task[str]]) -> list[str]:
    """Make room for one request after another, and return the names in the order in which they were admitted."""
    begin = len(room.taken_by)
    for served in range(len(tasks)):
        room.places = 1
        line.wake()
        while len(room.taken_by) == begin + served:
            await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    return room.taken_by[begin:]


async def test_with_room_nobody_waits() -> None:
    room = Room()
    room.places = 1
    assert await AdmissionQueue(0, 60).admit(room.ask("a")) == "a"


async def test_first_come_first_served() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    tasks = await queue_up(line, room, "a", "b", "c")
    for _ in tasks:
        room.places += 1
        line.wake()
    assert await asyncio.gather(*tasks) == ["a", "b", "c"] == room.taken_by
    assert len(line) == 0


async def test_a_newcomer_does_not_overtake() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    tasks = await queue_up(line, room, "a")
    room.places = 1
    tasks.append(asyncio.create_task(line.admit(room.ask("b"))))
    await tasks[0]
    assert room.taken_by == ["a"]
    room.places = 1
    await tasks[1]


async def test_the_first_in_line_asks_again_by_itself() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    tasks = await queue_up(line, room, "a")
    room.places = 1
    assert await tasks[0] == "a"


async def test_who_had_a_place_already_waits_before_all_others() -> None:
    line, room = AdmissionQueue(1, 60), Room()
    waiting = await queue_up(line, room, "a")
    returning = await queue_up(line, room, "b", first=True)
    room.places = 2
    line.wake()
    await asyncio.gather(*waiting, *returning)
    assert room.taken_by == ["b", "a"]


async def test_those_who_lost_their_places_are_served_in_the_order_of_their_coming() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    waiting = await queue_up(line, room, "a")
    returning = await queue_up(line, room, "b", "c", "d", first=True)
    assert await serve_one_by_one(line, room, waiting + returning) == ["b", "c", "d", "a"]


async def test_a_newcomer_waits_behind_one_of_the_patient_and_no_more() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    patient = await queue_up(line, room, "p1", "p2", "p3", patient=True)
    others = await queue_up(line, room, "a", "b")
    assert await serve_one_by_one(line, room, patient + others) == ["p1", "a", "b", "p2", "p3"]


async def test_the_patient_get_their_turn_however_many_come_later() -> None:
    line, room = AdmissionQueue(100, 60), Room()
    tasks = await queue_up(line, room, "a")
    tasks += await queue_up(line, room, "p1", "p2", patient=True)
    for name in "bcdef":  # one request arrives for each that is admitted
        tasks += await queue_up(line, room, name)
        room.places = 1
        line.wake()
        while room.places:
            await asyncio.sleep(0.001)
    assert room.taken_by == ["a", "p1", "b", "c", "p2"]
    await serve_one_by_one(line, room, [task for task in tasks if not task.done()])


async def test_the_patient_fill_no_places_of_the_line() -> None:
    line, room = AdmissionQueue(1, 60), Room()
    tasks = await queue_up(line, room, "p1", "p2", patient=True)
    tasks += await queue_up(line, room, "b", first=True)
    tasks += await queue_up(line, room, "a")
    assert len(line) == 4
    with pytest.raises(BusyError, match="queue is full"):
        await line.admit(room.ask("c"))
    assert await serve_one_by_one(line, room, tasks) == ["b", "p1", "a", "p2"]
    assert len(line) == 0


async def test_one_of_the_patient_that_gives_up_leaves_its_turn_to_the_next() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    first, second, third = await queue_up(line, room, "p1", "p2", "p3", patient=True)
    for task in (second, first):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    room.places = 1
    assert await third == "p3"
    assert len(line) == 0


async def test_who_asks_for_long_keeps_its_place_and_holds_up_nobody() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    answered = asyncio.Event()
    ask = room.ask("a")

    async def ask_a_slow_worker() -> str | None:
        await answered.wait()
        return await ask()

    slow = asyncio.create_task(line.admit(ask_a_slow_worker))
    await asyncio.sleep(0)
    room.places = 1
    assert await line.admit(room.ask("b")) == "b"
    waiting = await queue_up(line, room, "c")
    answered.set()
    while len(line) == 1:
        await asyncio.sleep(0)
    assert await serve_one_by_one(line, room, [slow, *waiting]) == ["a", "c"]


async def test_those_behind_do_not_wait_for_a_slow_answer() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    answered = asyncio.Event()
    ask, asked = room.ask("a"), 0

    async def ask_a_slow_worker() -> str | None:
        nonlocal asked
        if (asked := asked + 1) == 3:
            await answered.wait()
        return await ask()

    slow = asyncio.create_task(line.admit(ask_a_slow_worker))
    while asked < 3:
        await asyncio.sleep(0.001)
    (other,) = await queue_up(line, room, "b")
    room.places = 1
    assert await other == "b"
    waiting = await queue_up(line, room, "c", "d")
    answered.set()
    while any(turn.asks for turn in line._state):
        await asyncio.sleep(0.001)
    assert await serve_one_by_one(line, room, [slow, *waiting]) == ["a", "c", "d"]


async def test_the_more_urgent_stand_before_the_others() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    tasks = await queue_up(line, room, "a", "b")
    tasks += await queue_up(line, room, "later", priority=1)
    tasks += await queue_up(line, room, "c")
    tasks += await queue_up(line, room, "p1", "p2", priority=2, patient=True)
    tasks += await queue_up(line, room, "urgent", "too", priority=-1)
    tasks += await queue_up(line, room, "lost its worker", priority=5, first=True)
    served = await serve_one_by_one(line, room, tasks)
    assert served == ["lost its worker", "urgent", "too", "a", "b", "c", "p1", "p2", "later"]


async def test_the_patient_are_not_refused_and_wait_behind_the_others() -> None:
    line, room = AdmissionQueue(1, 0.01), Room()
    waiting = asyncio.create_task(line.admit(room.ask("a")))
    await asyncio.sleep(0)
    patient = asyncio.create_task(line.admit(room.ask("b"), QueueClaim(patient=True)))
    with pytest.raises(BusyError, match=r"within 0\.01 seconds"):
        await waiting
    await asyncio.sleep(0.02)
    room.places = 1
    assert await patient == "b"


async def test_a_full_line_refuses_at_once() -> None:
    line, room = AdmissionQueue(1, 60), Room()
    tasks = await queue_up(line, room, "a")
    with pytest.raises(BusyError, match="queue is full"):
        await line.admit(room.ask("b"))
    room.places = 1
    await tasks[0]


async def test_waiting_has_an_end() -> None:
    line = AdmissionQueue(1, 0.01)
    with pytest.raises(BusyError, match=r"within 0\.01 seconds"):
        await line.admit(Room().ask("a"))
    assert len(line) == 0


async def test_who_gives_up_leaves_the_line_to_the_next() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    first, second = await queue_up(line, room, "a", "b")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    room.places = 1
    assert await second == "b"


async def test_an_error_of_the_attempt_ends_the_waiting() -> None:
    async def attempt() -> str | None:
        raise ValueError("no")

    line = AdmissionQueue(10, 60)
    with pytest.raises(ValueError, match="no"):
        await line.admit(attempt)
    assert len(line) == 0


async def test_a_key_that_floods_the_queue_delays_only_itself() -> None:
    line, room = AdmissionQueue(10, 60), Room()
    tasks = await queue_up(line, room, "a1", "a2", "a3", owner="a")
    tasks += await queue_up(line, room, "b1", "b2", owner="b")
    tasks += await queue_up(line, room, "heavy1", "heavy2", owner="c", weight=2.0)
    served = await serve_one_by_one(line, room, tasks)
    assert served == ["a1", "b1", "heavy1", "heavy2", "a2", "b2", "a3"]


async def test_a_full_line_of_one_key_makes_place_for_another() -> None:
    refused: list[tuple[str, str]] = []
    line, room = AdmissionQueue(2, 60, lambda *refusal: refused.append(refusal)), Room()
    first, second = await queue_up(line, room, "a1", "a2", owner="a", request_class="flood")
    other = asyncio.create_task(line.admit(room.ask("b"), QueueClaim(owner="b")))
    with pytest.raises(NoRoomError, match="queue is full") as caught:
        await second
    assert (caught.value.reason, refused) == ("queue_full", [("flood", "queue_full")])
    assert await serve_one_by_one(line, room, [first, other]) == ["a1", "b"]


async def test_a_full_line_makes_place_for_the_more_urgent() -> None:
    line, room = AdmissionQueue(1, 60), Room()
    (later,) = await queue_up(line, room, "later", priority=1)
    urgent = asyncio.create_task(line.admit(room.ask("urgent"), QueueClaim(priority=-1)))
    with pytest.raises(NoRoomError, match="more urgent"):
        await later
    with pytest.raises(NoRoomError, match="queue is full"):
        await line.admit(room.ask("too late"))
    assert await serve_one_by_one(line, room, [urgent]) == ["urgent"]


async def test_who_cannot_have_its_first_token_in_time_leaves_the_line() -> None:
    line, room = AdmissionQueue(10, 60), Room()

    def demand() -> Demand:
        return Demand(first_token_by=time.monotonic() + 0.02)

    with pytest.raises(NoRoomError, match="later than the objective") as caught:
        await line.admit(room.ask("a"), QueueClaim(measure=demand))
    assert (caught.value.reason, len(line)) == ("overload", 0)


async def test_a_stranded_request_that_lost_its_worker_does_not_hold_up_others() -> None:
    line, room, gone = AdmissionQueue(8, 60), Room(), Room()
    stranded = asyncio.create_task(line.admit(gone.ask("stranded"), QueueClaim(first=True, is_stranded=lambda: True)))
    while not len(line):
        await asyncio.sleep(0)
    room.places = 1
    async with asyncio.timeout(10):
        assert await line.admit(room.ask("b")) == "b"
        gone.places = 1
        assert await stranded == "stranded"


class Feed:
    """Workers with room, which take prompts of fewer tokens than `below` and hold back all others."""

    def __init__(self) -> None:
        self.below = 0
        self.taken: list[int] = []
        self.tries: list[int] = []

    def send(self, line: AdmissionQueue, tokens: int) -> asyncio.Task[int]:
        async def attempt() -> int | Held:
            await asyncio.sleep(0)
            self.tries.append(tokens)
            if tokens >= self.below:
                return HELD
            self.taken.append(tokens)
            return tokens

        claim = QueueClaim(measure=lambda: Demand(prompt_tokens=tokens))
        return asyncio.create_task(line.admit(attempt, claim))


async def test_a_short_prompt_passes_those_that_are_held_back() -> None:
    line, feed = AdmissionQueue(10, 60), Feed()
    waits: list[None] = []
    line.call_on_wait(lambda: waits.append(None))
    held = [feed.send(line, tokens) for tokens in (1600, 1700)]
    while len(line) < 2:
        await asyncio.sleep(0)
    feed.below = 300
    assert await feed.send(line, 200) == 200
    assert len(line) == len(waits) == 2
    feed.below = 2000
    line.wake()
    assert await asyncio.gather(*held) == [1600, 1700]
    assert feed.taken == [200, 1600, 1700]


async def test_a_short_prompt_that_waits_passes_as_soon_as_it_may() -> None:
    line, feed = AdmissionQueue(10, 5), Feed()
    tasks = [feed.send(line, tokens) for tokens in (1600, 200)]
    while len(line) < 2:
        await asyncio.sleep(0)
    feed.below = 300
    assert await tasks[1] == 200  # nothing wakes the queue: it looks again by itself
    assert not tasks[0].done()
    feed.below = 2000
    assert await tasks[0] == 1600


async def test_somebody_looks_again_after_a_first_try_was_held_back_behind_others() -> None:
    line, room, answers = AdmissionQueue(10, 5), Room(), asyncio.Event()

    async def slow() -> Held:
        await answers.wait()
        await asyncio.sleep(0)
        return HELD

    def send(attempt, tokens: int) -> asyncio.Task[object]:
        return asyncio.create_task(line.admit(attempt, QueueClaim(measure=lambda: Demand(prompt_tokens=tokens))))

    tasks = [send(slow, 500)]
    await asyncio.sleep(0)
    tasks += [send(room.ask("long"), 1600), send(room.ask("short"), 200)]
    while len(line) < 2:
        await asyncio.sleep(0)
    answers.set()
    while len(line) < 3:
        await asyncio.sleep(0)
    room.places = 1  # nothing wakes the queue
    async with asyncio.timeout(3):
        assert await tasks[2] == "short"
    for task in tasks:
        task.cancel()


async def test_longer_prompts_do_not_try_behind_one_that_is_held_back() -> None:
    line, feed = AdmissionQueue(10, 60), Feed()
    tasks = [feed.send(line, tokens) for tokens in (1600, 1700, 1600, 1800)]
    while len(line) < 4:
        await asyncio.sleep(0)
    feed.tries.clear()
    line.wake()
    await asyncio.sleep(0.01)
    assert set(feed.tries) == {1600}
    feed.below = 2000
    line.wake()
    assert await asyncio.gather(*tasks) == [1600, 1700, 1600, 1800]
    assert feed.taken == [1600, 1700, 1600, 1800]


async def test_nobody_passes_a_request_for_which_there_is_no_room() -> None:
    line, room, feed = AdmissionQueue(10, 60), Room(), Feed()
    feed.below = 300
    (first,) = await queue_up(line, room, "a")
    short = feed.send(line, 200)
    await asyncio.sleep(0.01)
    assert not short.done()
    room.places = 1
    line.wake()
    assert await first == "a"
    assert await short == 200
