"""How long a gateway goes on with a sequence, and what it says at the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator

import pytest

from paceline.core.config import GatewayConfig
from paceline.core.errors import UnavailableError
from paceline.core.types import SamplingParams, Token
from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import Member
from paceline.services.common.tasks import InUse
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.patience import Patience
from paceline.services.gateway.sequences.progress import Generated, NobodyFound
from paceline.services.gateway.sequences.worker_call import WorkerFailedError
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.toy_plans import toy_sequence

OTHERS = Generated([Token(1)])


class Trouble:
    """A sequence whose attempts on the decode worker "d" fail after its first four tokens."""

    def __init__(self, fleet: Fleet) -> None:
        self.worker = RemoteWorker(Member("d", "decode", 1, "127.0.0.1:1", "host"), Credentials())
        self.sequence = toy_sequence([1, 2], SamplingParams(max_tokens=99))
        self.sequences = InUse()
        self.patience = Patience(GatewayConfig(max_attempts=3, request_seconds=50.0), fleet, self.sequences)
        self._attempt(4)

    def _attempt(self, tokens: int) -> AttemptTrace:
        attempt_trace = AttemptTrace(admitted=time.monotonic())
        self.sequence.trace.tries.append(attempt_trace)
        self.sequence.work("")
        self.patience.begin_attempt(self.sequence)
        if tokens:
            event = Generated([Token(7)] * tokens)
            self.patience.hear(event)
            self.sequence.note(event, attempt_trace)
        return attempt_trace

    def fail(
        self, unreachable: bool = True, others: bool = True, alone: bool = False, tokens: int = 0, begun: bool = True
    ) -> None:
        """Run an attempt that ends with a failure. `others` says whether other sequences get on meanwhile."""
        attempt_trace = self._attempt(tokens)
        if others:
            self.patience.hear(OTHERS)
        error = WorkerFailedError("decode worker d has ended", self.worker, unreachable)
        self.sequences.count = 1 if alone else 2
        self.patience.note(error, self.sequence, attempt_trace, begun=begun)
        self.worker.set_aside = False  # it is back

    def is_given_up(self) -> bool:
        try:
            self.patience.check(self.sequence)
        except UnavailableError:
            return True
        return False


@pytest.fixture
async def trouble(cluster: Cluster) -> AsyncIterator[Trouble]:
    trouble = Trouble(cluster.fleet)
    yield trouble
    await trouble.worker.close()


async def test_a_request_at_which_its_workers_end_is_given_up(trouble: Trouble) -> None:
    trouble.fail()
    trouble.fail()
    assert not trouble.is_given_up()
    trouble.fail(tokens=1)  # of the prefill worker, so it is no progress
    with pytest.raises(UnavailableError) as caught:
        trouble.patience.check(trouble.sequence)
    assert "failed 3 times at the same step, after 5 tokens" in str(caught.value)
    assert "decode worker d has ended" in str(caught.value)


async def test_workers_that_end_elsewhere_explain_it(trouble: Trouble, cluster: Cluster) -> None:
    for _ in range(9):
        cluster.fleet.ends.note("another")
        trouble.fail()
    assert not trouble.is_given_up()


async def test_a_fleet_in_which_nobody_gets_on_explains_it(trouble: Trouble) -> None:
    for _ in range(9):
        trouble.fail(others=False)
    assert not trouble.is_given_up()


async def test_a_request_that_is_alone_explains_nothing(trouble: Trouble) -> None:
    for _ in range(3):
        trouble.fail(others=False, alone=True)
    assert trouble.is_given_up()


async def test_progress_begins_a_new_count(trouble: Trouble) -> None:
    for _ in range(9):
        trouble.fail(tokens=2)
    assert not trouble.is_given_up()


async def test_errors_of_a_worker_that_goes_on_count_in_any_case(trouble: Trouble, cluster: Cluster) -> None:
    for _ in range(3):
        cluster.fleet.ends.note("another")
        trouble.fail(unreachable=False)
    assert trouble.is_given_up()


async def test_what_had_not_begun_or_drains_counts_never(trouble: Trouble) -> None:
    for _ in range(9):
        trouble.fail(begun=False)
    trouble.worker.member = dataclasses.replace(trouble.worker.member, state="draining")
    for _ in range(9):
        trouble.fail()
    assert not trouble.is_given_up()


async def test_a_request_that_has_begun_waits_until_its_deadline(trouble: Trouble) -> None:
    trouble.sequence.advance(NobodyFound(time.monotonic() - 1000, is_busy=False, is_left_behind=False))
    assert not trouble.is_given_up()
    trouble.fail()
    trouble.sequence.trace.arrived -= 60
    with pytest.raises(UnavailableError, match="longer than 50 seconds; the last failure: decode worker d has ended"):
        trouble.patience.check(trouble.sequence)
