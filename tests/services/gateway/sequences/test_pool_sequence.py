"""A bundle of inputs as a sequence: a later attempt has the inputs without a result, and no result is taken twice."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.core.pooling import PoolWish
from paceline.core.types import FinishReason, SamplingParams
from paceline.proto import common_pb2, worker_pb2
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.planning.pool_bundle import PoolBundle, PoolInput
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.kinds import ComputeAttempt
from paceline.services.gateway.sequences.progress import Ended, PooledRows
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.sequences.worker_call import WorkerFailedError

INPUTS = [PoolInput([index, index]) for index in range(5, 10)]


def bundle() -> SequenceRun:
    pool = PoolBundle(PoolWish("embed"), INPUTS)
    prompt = PromptPlan(
        text=None,
        token_ids=[token for each in INPUTS for token in each.token_ids],
        sampling=SamplingParams(max_tokens=0),
        pool=pool,
    )
    plan = Plan(
        prompts=[prompt],
        n=1,
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
        cache_salt="",
        kind=common_pb2.WORK_KIND_POOL,
    )
    return SequenceRun("pooled", plan)


def tokens(work: common_pb2.Work) -> list[int]:
    return [each.token_ids[0] for each in work.pool.inputs]


def rows(*inputs: int) -> PooledRows:
    return PooledRows(list(inputs), [1] * len(inputs), 1, bytes(4 * len(inputs)), {})


def test_a_later_attempt_has_the_inputs_without_a_result() -> None:
    sequence, trace = bundle(), AttemptTrace()
    assert tokens(sequence.work("model")) == [5, 6, 7, 8, 9]
    assert sequence.step(trace).prompt == 0
    assert sequence.note(rows(1, 3), trace) == rows(1, 3)
    assert sequence.step(trace).prompt == 2
    assert sequence.end() is None
    assert tokens(sequence.work("model")) == [5, 7, 9]
    assert sequence.note(rows(1, 2), trace) == rows(2, 4)
    assert tokens(sequence.work("model")) == [5]
    sequence.note(rows(0), trace)
    assert sequence.end() is FinishReason.STOP
    assert trace.scores == len(INPUTS)


class Call:
    """A call to a worker that sends these events."""

    def __init__(self, *events: worker_pb2.ComputeEvent) -> None:
        self._events = list(events)

    async def read(self, seconds: float) -> worker_pb2.ComputeEvent:
        return self._events.pop(0)


def pooled(first: int, *counts: int, **changes: Any) -> worker_pb2.ComputeEvent:
    values = {"first": first, "rows": counts, "dim": 2, "data": bytes(8 * sum(counts)), **changes}
    return worker_pb2.ComputeEvent(pooled=worker_pb2.Pooled(**values))


COMPUTED = worker_pb2.ComputeEvent(computed=worker_pb2.Computed())


async def results_of(*events: worker_pb2.ComputeEvent) -> list[object]:
    """Return the events of an attempt at work with three inputs whose worker sends these messages."""
    attempt = cast(Any, ComputeAttempt.__new__(ComputeAttempt))
    attempt._call, attempt._left, attempt._worker = Call(*events), {0, 1, 2}, "pool worker w"
    attempt._stall_seconds, attempt._encoding = 1.0, None
    found: list[object] = []
    await attempt.run(found.append)
    return found


async def test_an_attempt_ends_when_each_input_has_a_result() -> None:
    assert await results_of(pooled(1, 1, 3), pooled(0, 1), COMPUTED) == [
        PooledRows(range(1, 3), (1, 3), 2, bytes(32), {}),
        PooledRows(range(1), (1,), 2, bytes(8), {}),
        Ended(FinishReason.LENGTH),
    ]
    failed = pooled(0, 1, 0, 1, errors=[worker_pb2.PoolError(input=1, message="not finite")])
    assert (await results_of(failed, COMPUTED))[0] == PooledRows(range(3), (1, 0, 1), 2, bytes(16), {1: "not finite"})


@pytest.mark.parametrize(
    "events",
    [
        [pooled(0, 1, 1), COMPUTED],
        [pooled(0, 1, 1), pooled(1, 1, 1), COMPUTED],
        [pooled(0, 1, 1, 1, 1), COMPUTED],
        [pooled(0, 1, 1, 1, data=b"short"), COMPUTED],
        [pooled(0), COMPUTED],
        [pooled(0, 1, 1, 1, errors=[worker_pb2.PoolError(input=1)]), COMPUTED],
    ],
    ids=["missing", "twice", "beyond", "bytes", "empty", "error with rows"],
)
async def test_a_worker_that_sends_other_results_than_asked_for_has_failed(
    events: list[worker_pb2.ComputeEvent],
) -> None:
    with pytest.raises(WorkerFailedError, match="out of turn"):
        await results_of(*events)
