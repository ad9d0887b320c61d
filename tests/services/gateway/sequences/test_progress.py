"""What each event changes in the progress of a sequence, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.core.types import FinishReason, Token
from paceline.services.gateway.sequences.progress import (
    AttemptAdmitted,
    AttemptAsked,
    AttemptFailed,
    AttemptQueued,
    Cause,
    EncodingRefused,
    Ended,
    Failure,
    Failures,
    Generated,
    HandedOver,
    NobodyFound,
    ProgressEvent,
    ProgressStep,
    PromptScores,
    SequenceProgress,
    WorkerLeft,
    WorkerWaited,
)

STEP = ProgressStep(tokens=4, prompt=2)
ERROR = Failure(STEP, Cause.REQUEST)
ELSEWHERE = Failure(STEP, Cause.ELSEWHERE)
TOKENS = [Token(7), Token(8)]
NEW = SequenceProgress(failed_at=1.0)

TABLE: list[tuple[str, dict[str, Any], ProgressEvent, dict[str, Any]]] = [
    ("an attempt waits", {}, AttemptQueued(9), {"heard_before": 9}),
    ("a worker is ready", {"waited": 1.0}, WorkerWaited(2.5), {"waited": 2.5}),
    ("nobody is there", {}, NobodyFound(5.0, False, False), {"unreachable_since": 5.0}),
    ("still nobody is there", {"unreachable_since": 5.0}, NobodyFound(6.0, False, False), {}),
    (
        "only full ones are there",
        {"unreachable_since": 5.0},
        NobodyFound(6.0, True, False),
        {"unreachable_since": None},
    ),
    (
        "only other weights are there",
        {},
        NobodyFound(5.0, False, True),
        {"unreachable_since": 5.0, "is_left_behind": True},
    ),
    ("own weights are back", {"is_left_behind": True}, NobodyFound(5.0, True, False), {"is_left_behind": False}),
    ("workers are asked", {"attempts": 1}, AttemptAsked(3), {"attempts": 2, "generated_before": 3}),
    ("workers admit", {"unreachable_since": 5.0}, AttemptAdmitted(), {"unreachable_since": None}),
    ("tokens come", {}, Generated(TOKENS), {}),
    ("tokens come after a refusal", {"refused_since": 5.0}, Generated(TOKENS), {"refused_since": None}),
    ("scores come", {"scored": 1}, PromptScores(1, TOKENS), {"scored": 3}),
    ("scores come again", {"scored": 5}, PromptScores(1, TOKENS), {}),
    ("blocks are handed over", {"refused_since": 5.0}, HandedOver(), {}),
    ("the answer ends", {"refused_since": 5.0}, Ended(FinishReason.STOP), {}),
    ("an encoding is refused", {}, EncodingRefused(5.0), {"refused_since": 5.0}),
    ("encodings are still refused", {"refused_since": 5.0}, EncodingRefused(6.0), {}),
    ("it leaves a worker", {"failed": frozenset({"a"})}, WorkerLeft("d"), {"failed": frozenset({"a", "d"})}),
    (
        "a worker fails at the request",
        {"failed": frozenset({"a"}), "failed_on": "a", "last_failure": "earlier"},
        AttemptFailed(5.0, ERROR, "d", "why"),
        {
            "failures": Failures(STEP, errors=1),
            "failed": frozenset({"a", "d"}),
            "failed_at": 5.0,
            "failed_on": "d",
            "last_failure": "why",
        },
    ),
    (
        "a worker drains",
        {"failed_on": "a"},
        AttemptFailed(5.0, ELSEWHERE, "d", "why"),
        {"failures": Failures(STEP), "failed": frozenset({"d"}), "last_failure": "why"},
    ),
    (
        "a link fails",
        {"failed_on": "a"},
        AttemptFailed(5.0, ELSEWHERE, "d", "why", is_of_link=True),
        {"failures": Failures(STEP), "last_failure": "why"},
    ),
]


@pytest.mark.parametrize(("before", "event", "changes"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_an_event_changes(before: dict[str, Any], event: ProgressEvent, changes: dict[str, Any]) -> None:
    progress = dataclasses.replace(NEW, **before)
    assert progress.after(event) == dataclasses.replace(progress, **changes)


def test_tokens_make_no_copy() -> None:
    assert NEW.after(Generated(TOKENS)) is NEW
