"""One attempt, against toy workers; what a client sees of attempts that fail is in test_trouble.py."""

from __future__ import annotations

import pytest

from paceline.core.types import Key, SamplingParams
from paceline.proto import common_pb2
from paceline.services.common.wire import key_to_pb, sampling_to_pb
from paceline.services.gateway.attempt import Attempt, Ended, Event, HandedOver
from tests.services.gateway.conftest import PATIENCE, Cluster


@pytest.mark.parametrize(("max_tokens", "end"), [(9, HandedOver), (1, Ended)])
async def test_a_prefill_worker_that_is_done_is_not_counted_any_more(
    cluster: Cluster, max_tokens: int, end: type[Event]
) -> None:
    await cluster.add("d")
    await cluster.add("p", "prefill")
    decode, prefill = cluster.fleet.worker("d"), cluster.fleet.worker("p")
    work = common_pb2.Work(
        key=key_to_pb(Key("r", 1, 1)),
        token_ids=[1, 2, 3],
        prompt_tokens=3,
        sampling=sampling_to_pb(SamplingParams(max_tokens=max_tokens)),
    )
    attempt = Attempt(cluster.fleet, decode, prefill, work, seconds=PATIENCE, stall_seconds=PATIENCE)
    await attempt.admit()
    assert (decode.in_flight, prefill.in_flight) == (1, 1)
    seen: list[tuple[int, int]] = []

    def take(event: Event) -> None:
        if isinstance(event, end) and not seen:
            seen.append((decode.in_flight, prefill.in_flight))

    await attempt.run(take)
    assert seen == [(1, 0)]
    attempt.close()
    assert (decode.in_flight, prefill.in_flight) == (0, 0)
