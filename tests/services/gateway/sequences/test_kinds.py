"""Work without decoding, which needs only a prefill worker."""

from __future__ import annotations

import grpc
import pytest

from paceline.core.errors import BusyError
from paceline.proto import common_pb2
from tests.services.gateway.conftest import StartStack
from tests.services.gateway.toy_workers import ToyWorker

SCORING = {"prompt": "abcdefgh", "max_tokens": 0, "echo": True, "logprobs": 1}


def kinds(worker: ToyWorker) -> list[int]:
    return [call.work.kind for call in worker.calls]


@pytest.mark.parametrize("router_mode", ["kv", "round-robin"])
@pytest.mark.parametrize(
    ("prefill", "decode", "worker"), [(1, 0, "prefill-0"), (1, 1, "prefill-0"), (0, 1, "decode-0")]
)
async def test_scoring_runs_on_a_prefill_worker_if_there_is_one(
    start_stack: StartStack, router_mode: str, prefill: int, decode: int, worker: str
) -> None:
    stack = await start_stack(prefill=prefill, decode=decode, router_mode=router_mode)
    answer = (await stack.post("/v1/completions", **SCORING)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abcdefgh"
    assert choice["finish_reason"] == "length"
    assert [score is None for score in choice["logprobs"]["token_logprobs"]] == [True] + [False] * 7
    assert answer["usage"]["completion_tokens"] == 0
    assert {name: kinds(each) for name, each in stack.workers.items() if each.calls} == {
        worker: [common_pb2.WORK_KIND_SCORE]
    }


async def test_generating_says_its_kind(start_stack: StartStack) -> None:
    stack = await start_stack()
    assert (await stack.post("/v1/completions", prompt="abc", max_tokens=3)).status_code == 200
    assert [kinds(worker) for worker in stack.workers.values()] == [[common_pb2.WORK_KIND_GENERATE]] * 2


async def test_scoring_goes_on_elsewhere_when_a_worker_fails(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=2, decode=1)
    for worker in stack.workers.values():
        worker.fail_after = 1
        worker.fail_code = grpc.StatusCode.INTERNAL
    failing = stack.post("/v1/completions", **SCORING)
    assert (await failing).status_code == 503
    stack.workers["prefill-1"].fail_after = None
    answer = (await stack.post("/v1/completions", **SCORING)).json()
    assert [score is None for score in answer["choices"][0]["logprobs"]["token_logprobs"]] == [True] + [False] * 7
    assert stack.workers["decode-0"].calls == []


@pytest.mark.slow
async def test_scoring_waits_for_room(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1, decode=1, queue_seconds=0.3)
    stack.workers["prefill-0"].refusal = BusyError("this toy is full")
    assert (await stack.post("/v1/completions", **SCORING)).status_code == 429
    assert stack.workers["decode-0"].calls == []
