"""Steps of prompts with media: they wait for encodings, and cut no span whose tokens see each other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.media import MediaKind, MediaSpan
from paceline.core.types import Key
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Computed, RowEncoded, Sampled, Step
from tests.engine.toy_requests import ToyDevice, make_request

WHOLE = frozenset({MediaKind.IMAGE})


def image(start: int, length: int) -> MediaSpan:
    return MediaSpan(start, length, b"image", MediaKind.IMAGE)


def audio(start: int, length: int) -> MediaSpan:
    return MediaSpan(start, length, b"audio", MediaKind.AUDIO)


class Driver:
    """A scheduler and a toy device, one step at a time."""

    def __init__(self, budget: int, whole: frozenset[MediaKind] = WHOLE) -> None:
        self.scheduler = Scheduler(Limits(budget, 4096, 8, whole_media=whole))
        self.steps: list[Step] = []
        self.events: list[object] = []
        self._device = ToyDevice()

    def go_on(self) -> list[tuple[str, int, int]]:
        """Run until no request can continue. Return (request, start, end) of the chunks of prompts."""
        first = len(self.steps)
        while step := self.scheduler.plan():
            self.steps.append(step)
            self.scheduler.apply(step, self._device.execute(step))
            self.events += self.scheduler.take_events()
        chunks = [chunk for step in self.steps[first:] for chunk in step.chunks if chunk.prefills]
        return [(chunk.key.request_id, chunk.start, chunk.end) for chunk in chunks]


def test_a_prompt_is_computed_up_to_the_first_encoding_that_is_missing() -> None:
    driver, key = Driver(1000), Key("a", 1, 1)
    driver.scheduler.add(make_request("a", [1] * 100, 3, media=[image(10, 20), audio(40, 30)]))
    assert driver.go_on() == [("a", 0, 10)]
    driver.scheduler.provide(key, 1, [7, 8])  # in another order
    assert driver.go_on() == []
    driver.scheduler.provide(key, 0, [5])
    assert driver.go_on() == [("a", 10, 100)]
    assert sum(isinstance(event, Sampled) for event in driver.events) == 3
    encodings = [update for step in driver.steps for update in step.updates if isinstance(update, RowEncoded)]
    assert [(update.span, update.slots) for update in encodings] == [(1, (7, 8)), (0, (5,))]


def test_others_go_on_while_a_prompt_waits() -> None:
    driver = Driver(64)
    driver.scheduler.add(make_request("a", [1] * 50, 1, media=[image(0, 20)]))
    driver.scheduler.add(make_request("b", [1] * 50, 9))
    assert driver.go_on() == [("b", 0, 50)]
    assert sum(isinstance(event, Sampled) for event in driver.events) == 9
    driver.scheduler.provide(Key("a", 1, 1), 0, [1])
    assert driver.go_on() == [("a", 0, 50)]


def test_no_whole_image_is_computed_beside_the_end_of_another_prompt() -> None:
    driver = Driver(64)
    driver.scheduler.add(make_request("a", [1] * 90, 1, media=[image(0, 50)]))
    driver.scheduler.provide(Key("a", 1, 1), 0, [1])
    driver.scheduler.add(make_request("b", [1] * 10, 1))
    assert driver.go_on()[:2] == [("b", 0, 10), ("a", 0, 50)]
    assert [len(step.chunks) for step in driver.steps[:2]] == [1, 1]


def test_an_encoding_may_be_known_from_the_start_or_be_for_a_request_that_has_left() -> None:
    driver = Driver(64)
    driver.scheduler.add(make_request("a", [1] * 30, 1, media=[image(3, 20)]))
    driver.scheduler.provide(Key("a", 1, 1), 0, [1])
    driver.scheduler.provide(Key("gone", 1, 1), 0, [2])
    assert driver.go_on() == [("a", 0, 30)]


@pytest.mark.parametrize(
    ("budget", "whole", "expected"),
    [
        (16, WHOLE, [(0, 16), (16, 20), (20, 50), (50, 64)]),
        (16, frozenset[MediaKind](), [(0, 16), (16, 32), (32, 48), (48, 64)]),
        (40, WHOLE, [(0, 20), (20, 50), (50, 64)]),
    ],
)
def test_a_chunk_ends_before_or_after_a_span_that_is_computed_as_a_whole(
    budget: int, whole: frozenset[MediaKind], expected: list[tuple[int, int]]
) -> None:
    driver = Driver(budget, whole)
    request = make_request("a", [1] * 64, 1, media=[image(20, 30), image(50, 10)])
    driver.scheduler.add(request)
    for span in range(2):
        driver.scheduler.provide(request.key, span, [span])
    assert [(start, end) for _, start, end in driver.go_on()] == expected


def test_a_chunk_may_begin_inside_a_span() -> None:
    driver = Driver(16)
    request = make_request("a", [1] * 90, 1, media=[image(2, 10), image(20, 60)], computed_len=32)
    driver.scheduler.add(request)
    assert driver.go_on() == []
    driver.scheduler.provide(request.key, 1, [1])  # the first span is computed, so its encoding is not needed
    assert driver.go_on() == [("a", 32, 80), ("a", 80, 90)]


def test_the_last_token_of_a_prompt_waits_for_its_encoding_too() -> None:
    driver = Driver(16)
    request = make_request("a", [1] * 33, 2, media=[image(30, 3)], computed_len=32)
    driver.scheduler.add(request)
    assert driver.go_on() == []
    driver.scheduler.provide(request.key, 0, [1])
    assert driver.go_on() == [("a", 32, 33)]
    assert sum(isinstance(event, Sampled) for event in driver.events) == 2


def test_a_span_must_lie_inside_the_context() -> None:
    with pytest.raises(ValueError, match="ends at 12"):
        make_request("a", [1] * 10, 1, media=[image(2, 10)])


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50), st.sampled_from([image, audio])), max_size=5),
    st.integers(1, 60),
    st.integers(0, 2**32),
)
def test_every_token_is_computed_once_and_no_image_is_cut(
    parts: list[tuple[int, int, object]], budget: int, seed: int
) -> None:
    rng, media, length = random.Random(seed), list[MediaSpan](), 0
    for text, count, kind in parts:
        media.append((image if kind is image else audio)(length + text, count))
        length += text + count
    length += rng.randint(0 if media else 1, 40)
    driver = Driver(max(budget, 8))
    request = make_request("a", [1] * length, 1, media=media, computed_len=rng.randrange(length) // 16 * 16)
    begin = request.computed_len
    driver.scheduler.add(request)
    chunks = driver.go_on()
    for span in rng.sample(range(len(media)), len(media)):
        driver.scheduler.provide(request.key, span, [span])
        chunks += driver.go_on()
    assert [start for _, start, _ in chunks] == [begin, *(end for _, _, end in chunks[:-1])]
    assert chunks[-1][2] == length
    ends = {end for _, _, end in chunks}
    assert not any(span.start < end < span.end for span in media for end in ends if span.kind == MediaKind.IMAGE)
    computed = [event.length for event in driver.events if isinstance(event, Computed)]
    assert sum(computed) == length - begin
