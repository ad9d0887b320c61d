"""Totals of requests by class, as the planner reads them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.core.errors import BusyError
from paceline.core.types import SamplingParams, Token
from paceline.proto.fleet_pb2 import ClassTraffic
from paceline.services.common.wire import distribution_from_pb
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.load import MOST_CLASSES, TrafficBook
from paceline.services.gateway.sequences.progress import Generated
from paceline.services.gateway.sequences.sequence import SequenceRun
from tests.services.gateway.toy_plans import toy_sequence


def sequence(prompt: int = 3, request_class: str = "default", **facts: Any) -> SequenceRun:
    return toy_sequence(range(prompt), SamplingParams(max_tokens=8), request_class=request_class, **facts)


def admitted(run: SequenceRun, *token_times: float) -> AttemptTrace:
    attempt_trace = AttemptTrace(admitted=time.monotonic(), token_times=list(token_times))
    run.trace.tries.append(attempt_trace)
    return attempt_trace


def default(book: TrafficBook) -> ClassTraffic:
    return next(each for each in book.report().classes if each.name == "default")


def test_latencies_count_while_the_answer_comes_and_once_each() -> None:
    book, run = TrafficBook(), sequence()
    start = run.trace.arrived
    with book.counted(run):
        assert (default(book).arrivals, default(book).waiting) == (1, 1)
        attempt_trace = admitted(run, start + 1.0, start + 1.1)
        for _ in range(2):
            found = default(book)
            assert (distribution_from_pb(found.ttft).count, distribution_from_pb(found.itl).count) == (1, 1)
        attempt_trace.token_times.append(start + 1.2)
        assert default(book).waiting == 0
        run.note(Generated([Token(1), Token(2), Token(3)]), AttemptTrace())
    found = default(book)
    assert distribution_from_pb(found.itl).count == 2
    assert 0.95 < distribution_from_pb(found.ttft).percentile(0.5) < 1.05
    assert (found.finished, found.refused, distribution_from_pb(found.answer_tokens).total) == (1, 0, 3)


def test_a_later_attempt_goes_on_where_the_one_before_ended() -> None:
    book, run = TrafficBook(), sequence()
    start = run.trace.arrived
    with book.counted(run):
        admitted(run, start + 1.0)
        admitted(run, start + 3.0, start + 3.5)
    found = default(book)
    assert distribution_from_pb(found.ttft).count == 1
    assert distribution_from_pb(found.itl).total == pytest.approx(2.5)


def run_into(book: TrafficBook, run: SequenceRun, error: Exception) -> None:
    with book.counted(run):
        raise error


def test_a_request_without_room_is_refused_and_one_that_was_served_is_not() -> None:
    book, waits, served = TrafficBook(), sequence(), sequence()
    admitted(served)
    for run in (waits, served):
        with pytest.raises(BusyError):
            run_into(book, run, BusyError("full"))
    assert (default(book).refused, default(book).finished) == (1, 1)


def test_requests_that_wait_before_they_can_be_planned_count_as_waiting() -> None:
    book = TrafficBook()
    with book.unplanned(), book.unplanned():
        assert default(book).waiting == 2
    assert default(book).waiting == 0


def test_classes_beyond_the_limit_count_as_the_default() -> None:
    book = TrafficBook()
    for number in range(MOST_CLASSES + 5):
        with book.counted(sequence(request_class=f"class {number}")):
            pass
    classes = book.report().classes
    assert len(classes) == MOST_CLASSES
    assert default(book).arrivals == 6
