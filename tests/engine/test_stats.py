"""The log of an engine's newest steps."""

from __future__ import annotations

from paceline.core.step_record import StepRecord
from paceline.core.types import Key, Token
from paceline.engine.stats import StepLog
from paceline.engine.step import Chunk, ChunkResult, Step, StepResult


def prompt(start: int, length: int) -> tuple[Chunk, ChunkResult]:
    chunk = Chunk(Key("p", 1, 1), 0, start, length, follows=False, samples=False, prefills=True)
    return chunk, ChunkResult()


def decoding(context: int, is_over: bool = False) -> tuple[Chunk, ChunkResult]:
    chunk = Chunk(Key("d", 1, 1), 1, context - 1, 1, follows=True, samples=True, prefills=False)
    return chunk, ChunkResult([] if is_over else [Token(7)])


def note(log: StepLog, *parts: tuple[Chunk, ChunkResult], seconds: float = 0.5) -> None:
    log.note(Step(tuple(chunk for chunk, _ in parts)), StepResult([result for _, result in parts], seconds))


def test_a_record_says_what_the_step_computed() -> None:
    log = StepLog(clock=lambda: 3.0)
    note(log, decoding(100), decoding(50), decoding(70, is_over=True), prompt(2, 3))
    # Tokens 2, 3 and 4 of the prompt attend to 3, 4 and 5 tokens.
    assert log.newest(9) == [StepRecord(0, 3.0, 0.5, 3, 12, 2, 0, 150)]


def test_only_the_newest_steps_are_kept_in_order() -> None:
    log = StepLog(kept=4)
    assert log.newest(4) == []
    for seconds in range(6):
        note(log, decoding(10), seconds=seconds)
    assert [(record.number, record.seconds) for record in log.newest(9)] == [(2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert [record.number for record in log.newest(2)] == [4, 5]
    assert log.newest(0) == []
