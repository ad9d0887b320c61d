"""What a client sees when all workers are full: it waits its turn, or gets an error if the wait would be too long."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT

pytestmark = pytest.mark.slow


async def test_busy_workers_are_waited_for_in_turn(start_stack: StartStack) -> None:
    stack = await start_stack()
    decode = stack.workers["decode-0"]
    decode.max_seqs = 1
    stack.pause_decode()
    first, second = Reader(stack, max_tokens=9), Reader(stack, max_tokens=9)
    await eventually(lambda: "refused" in decode.outcomes())
    await eventually(stack.has_load(2))
    decode.resume.set()
    assert await first.task == await second.task == TEXT[:9]
    finished = [call.work.key.request_id for call in decode.calls if call.outcome == "finished"]
    assert len(set(finished)) == 2


async def test_another_worker_is_asked_before_waiting(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=2)
    stack.workers["decode-0"].max_seqs = 0
    await stack.post("/v1/completions", prompt="x", max_tokens=2)
    assert stack.workers["decode-1"].outcomes() == ["finished"]


async def test_a_full_prefill_worker_is_waited_for(stack: Stack) -> None:
    prefill = stack.workers["prefill-0"]
    prefill.max_seqs = 1
    prefill.pause_after = 0
    first, second = Reader(stack, max_tokens=9), Reader(stack, max_tokens=9)
    await eventually(lambda: prefill.active == 1)
    await eventually(stack.has_load(2))
    prefill.resume.set()
    assert await first.task == await second.task == TEXT[:9]
    assert all(call.commands != ["prefill_here"] for call in stack.workers["decode-0"].calls)


async def test_a_prefill_worker_takes_the_next_prompt_while_those_before_decode(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=2)
    prefill = await stack.add("prefill", "prefill-0", max_seqs=1)
    await eventually(stack.sees_all)
    stack.pause_decode()
    readers = [Reader(stack, max_tokens=9) for _ in range(3)]
    for reader in readers:
        await eventually(lambda reader=reader: reader.text == TEXT[:6])  # type: ignore[misc]
    assert prefill.outcomes() == ["finished"] * 3
    for worker in stack.workers.values():
        worker.resume.set()
    assert [await reader.task for reader in readers] == [TEXT[:9]] * 3


async def test_who_waits_its_turn_is_not_taken_for_dead(start_stack: StartStack) -> None:
    stack = await start_stack(stall_seconds=2.0, max_attempts=1)
    decode = stack.workers["decode-0"]
    decode.pause_after, decode.alive_seconds = 5, 0.05
    reader = Reader(stack, max_tokens=9)
    await eventually(lambda: reader.text == TEXT[:6])
    await asyncio.sleep(2.5)
    decode.resume.set()
    assert await reader.task == TEXT[:9]
    assert decode.outcomes() == ["finished"]


async def test_choices_of_one_request_meet_no_full_line(start_stack: StartStack) -> None:
    stack = await start_stack(max_waiting=1, queue_seconds=0.5)
    decode = stack.workers["decode-0"]
    decode.max_seqs, decode.token_delay = 1, 0.05
    answer = (await stack.post("/v1/completions", prompt=["a", "b"], n=3, max_tokens=4, seed=0)).json()
    assert [len(choice["text"]) for choice in answer["choices"]] == [4] * 6


async def test_a_full_line_and_a_long_wait_are_429(start_stack: StartStack) -> None:
    stack = await start_stack(max_waiting=1, queue_seconds=0.5)
    stack.workers["decode-0"].max_seqs = 0
    responses = await asyncio.gather(*(stack.post("/v1/completions", prompt="x", stream=True) for _ in range(2)))
    for response in responses:
        assert response.status_code == 429
        assert response.headers["retry-after"]
    messages = sorted(response.json()["error"]["message"] for response in responses)
    assert "its queue is full" in messages[0]
    assert "no worker had room within 0.5 seconds" in messages[1]


async def test_a_client_that_goes_while_waiting_leaves_the_line(start_stack: StartStack) -> None:
    stack = await start_stack()
    stack.workers["decode-0"].max_seqs = 0
    task = asyncio.create_task(stack.post("/v1/completions", prompt="x"))
    await eventually(stack.has_load(1))
    task.cancel()
    await eventually(stack.has_load(0))
