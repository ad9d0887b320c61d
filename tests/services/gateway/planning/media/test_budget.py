"""Requests share the memory for media, and give back all that they took."""

from __future__ import annotations

import pytest

from paceline.core.errors import BusyError
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.budget import MemoryBudget


def test_bytes_are_given_back_when_the_request_ends() -> None:
    memory = MemoryBudget(1000, 2)
    with memory.request() as request:
        request.take(300)
        with request.temporary() as take:
            take(200)
            assert memory.used == request.used == 500
        assert memory.used == request.used == 300
    assert memory.used == 0


def test_bytes_are_given_back_after_an_error() -> None:
    memory = MemoryBudget(1000, 2)

    def fail() -> None:
        with memory.request() as request, request.temporary() as take:
            request.take(300)
            take(200)
            take(1)

    with pytest.raises(MediaError):
        fail()
    assert memory.used == 0


def test_one_request_may_have_half() -> None:
    memory = MemoryBudget(1000, 2)
    with memory.request() as request:
        request.take(500)
        with pytest.raises(MediaError, match="--media-memory"):
            request.take(1)
        assert memory.used == 500


def test_other_requests_find_the_memory_full() -> None:
    memory = MemoryBudget(1000, 2)
    with memory.request() as one, memory.request() as two, memory.request() as three:
        one.take(500)
        two.take(450)
        with pytest.raises(BusyError, match="try again later"):
            three.take(51)
        three.take(50)
    assert memory.used == 0


def test_items_that_are_decoded_at_the_same_time_take_half() -> None:
    with MemoryBudget(1000, 4).request() as request:
        assert request.of_next_item == 125
        request.take(400)
        assert request.of_next_item == 100


def test_what_a_running_request_holds_counts_until_it_ends() -> None:
    memory = MemoryBudget(1000, 2)
    with memory.hold(400), memory.hold(400):
        assert memory.used == 800
        with pytest.raises(BusyError), memory.hold(201):
            pass
    assert memory.used == 0
    with pytest.raises(MediaError), memory.hold(501):
        pass
