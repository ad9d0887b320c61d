"""Workers that change their role while the gateway uses them."""

from __future__ import annotations

import pytest

from paceline.core.errors import DrainingError
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT

pytestmark = pytest.mark.slow


async def roles(stack: Stack) -> dict[str, str]:
    workers = (await stack.http.get("/fleet")).json()["workers"]
    return {each["worker_id"]: each["role"] for each in workers}


async def test_without_a_supervisor_the_gateway_asks_the_workers_themselves(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1, decode=2)
    answer = await stack.post("/fleet/scale", flip={"decode-1": "prefill"})
    assert answer.status_code == 200, answer.text
    await eventually(lambda: _have(stack, {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}))
    for index in range(6):
        sent = await stack.post("/v1/completions", prompt=f"{index} abc", max_tokens=3, seed=0)
        assert sent.json()["choices"][0]["text"] == TEXT[:3]
    assert stack.workers["decode-1"].calls  # it computes prompts now


async def _have(stack: Stack, wanted: dict[str, str]) -> bool:
    return await roles(stack) == wanted


@pytest.mark.parametrize(
    ("flip", "why"),
    [
        ({"decode-0": "prefill"}, "no decode worker would be left"),
        ({"nobody": "prefill"}, "no ready worker has the id 'nobody'"),
        ({"decode-0": "encode"}, "prefill"),
    ],
)
async def test_a_flip_that_makes_no_fleet_is_refused(stack: Stack, flip: dict[str, str], why: str) -> None:
    answer = await stack.post("/fleet/scale", flip=flip)
    assert answer.status_code == 400
    assert why in answer.text
    assert stack.workers["decode-0"].role == "decode"


async def test_numbers_need_a_supervisor(stack: Stack) -> None:
    for body in ({"decode": 2}, {"drain": ["decode-0"]}, {"decode": 2, "flip": {"prefill-0": "decode"}}):
        assert (await stack.post("/fleet/scale", **body)).status_code == 409


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_refuses_because_it_drains_costs_no_attempt_and_is_asked_no_more(
    start_stack: StartStack, role: str
) -> None:
    """Redis has not told yet that the worker drains, or has another role since."""
    stack = await start_stack(prefill=2, decode=2, max_attempts=1)
    drains = [stack.workers[f"{role}-0"], stack.workers[f"{role}-1"]]
    drains[0].refusal = DrainingError("this worker is draining")
    for index in range(6):
        sent = await stack.post("/v1/completions", prompt=f"{index} abc", max_tokens=3, seed=0)
        assert sent.status_code == 200, sent.text
    assert drains[0].outcomes().count("refused") <= 1
    assert drains[0].outcomes().count("finished") == 0
    states = {each["worker_id"]: each["state"] for each in (await stack.http.get("/fleet")).json()["workers"]}
    if drains[0].calls:
        assert states[drains[0].worker_id] == "draining"
    # Under a new epoch it is another worker, which may take work.
    drains[0].refusal = None
    drains[0].take_role(drains[0].role)

    async def is_used() -> bool:
        await stack.post("/v1/completions", prompt="again", max_tokens=2, seed=0)
        return "finished" in drains[0].outcomes()

    await eventually(is_used)


async def test_work_names_the_epoch_of_its_worker(stack: Stack) -> None:
    await stack.post("/v1/completions", prompt="abc", max_tokens=3, seed=0)
    for worker in stack.workers.values():
        assert [call.work.worker_epoch for call in worker.calls] == [worker._epoch]


async def test_a_stream_survives_the_flip_of_its_worker(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1, decode=2, max_attempts=1)
    stack.pause_decode(after=5)
    reader = Reader(stack, max_tokens=40)
    await eventually(lambda: len(reader.text) >= 5)
    first = next(worker for worker in stack.workers.values() if worker.role == "decode" and worker.calls)
    second = next(worker for worker in stack.workers.values() if worker.role == "decode" and worker is not first)
    second.resume.set()
    first.state = "draining"
    first.outboxes.tell_draining()
    await eventually(lambda: bool(second.calls))
    first.state = "ready"
    first.take_role("prefill")
    assert await reader.task == TEXT[:40]
