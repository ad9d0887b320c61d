"""What a client sees when workers or the client itself fail: as little as possible."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import openai
import pytest

from paceline.proto import worker_pb2
from paceline.services.gateway.sequences.runner import SequenceRunner
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT, ToyWorker


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED]
)
@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("after", [0, 1])
async def test_a_worker_fails_and_another_goes_on(
    start_stack: StartStack, code: grpc.StatusCode, role: str, after: int
) -> None:
    stack = await start_stack(prefill=2, decode=2)
    failing = stack.workers[f"{role}-0"]
    failing.fail_after, failing.fail_code = after, code
    answer = (await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)).json()
    assert answer["choices"][0]["text"] == TEXT[:30]
    assert answer["usage"]["completion_tokens"] == 30
    assert [call.outcome for call in failing.calls] == ["failed"]


async def test_the_next_attempt_starts_from_what_has_come(start_stack: StartStack) -> None:
    stack = await start_stack(decode=2)
    stack.workers["decode-0"].fail_after = 4
    await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)
    work = stack.workers["decode-1"].calls[0].work
    assert (bytes(work.token_ids), work.prompt_tokens) == (b"xThe q", 1)
    assert (work.key.attempt, work.key.generation, work.sampling.max_tokens) == (2, 1, 30)


async def test_a_worker_crashes_in_the_middle_of_a_stream(start_stack: StartStack) -> None:
    stack = await start_stack(decode=2)
    first = stack.workers["decode-0"]
    first.pause_after = 5
    reader = Reader(stack, max_tokens=40)
    await eventually(lambda: reader.text == TEXT[:6])
    await first.crash()
    assert await reader.task == TEXT[:40]


async def test_a_lone_worker_that_comes_back_goes_on(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0)
    first = stack.workers["decode-0"]
    first.pause_after = 5
    reader = Reader(stack, max_tokens=40)
    await eventually(lambda: reader.text == TEXT[:5])
    await first.crash()
    await first.stop()
    await stack.add("decode", "decode-0", port=first.port)
    assert await reader.task == TEXT[:40]


@pytest.mark.slow
async def test_a_silent_worker_counts_as_failed(start_stack: StartStack) -> None:
    stack = await start_stack(decode=2, stall_seconds=1.0)
    stack.workers["decode-0"].pause_after = 5
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)
    assert answer.json()["choices"][0]["text"] == TEXT[:30]
    assert (await stack.workers["decode-0"].calls[0].ended.wait()) is True
    assert stack.workers["decode-0"].outcomes() == ["cancelled"]


async def test_a_lost_end_is_known_all_the_same(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0)
    worker = stack.workers["decode-0"]
    worker.stop_at, worker.fail_after = 3, 4

    async def say_no_end(call: Any, work: Any, position: int, context: Any) -> None:
        for count in range(4):
            token, _ = worker.token(work, position + count)
            call.tell(tokens=worker_pb2.Tokens(tokens=[token]))
        await call.outbox.flush()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone before the end was said")

    worker.recite = say_no_end  # type: ignore[method-assign]
    choice = (await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The", "stop")
    assert len(worker.calls) == 1


async def test_prompt_logprobs_are_not_reported_twice(start_stack: StartStack) -> None:
    stack = await start_stack(decode=2)
    stack.workers["decode-0"].fail_after = 2
    body = {"prompt": "abcdef", "max_tokens": 9, "prompt_logprobs": 0}
    choice = (await stack.post("/v1/completions", **body)).json()["choices"][0]
    assert [report and list(report) for report in choice["prompt_logprobs"]] == [None, *([str(b)] for b in b"bcdef")]
    assert not stack.workers["decode-1"].calls[0].work.sampling.HasField("prompt_logprobs")


@pytest.mark.slow
async def test_an_attempt_that_got_on_is_no_reason_to_give_up(start_stack: StartStack) -> None:
    stack = await start_stack(max_attempts=2)
    stack.workers["decode-0"].fail_after = 4
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=16, seed=0)
    assert answer.json()["choices"][0]["text"] == TEXT[:16]
    assert stack.workers["decode-0"].outcomes().count("failed") > 2


async def test_after_all_attempts_it_is_503(start_stack: StartStack) -> None:
    stack = await start_stack(max_attempts=2)
    stack.workers["prefill-0"].fail_after, stack.workers["prefill-0"].fail_code = 0, grpc.StatusCode.INTERNAL
    response = await stack.post("/v1/completions", prompt="x", stream=True)
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "given up because it failed 2 times at the same step, before its first token" in message
    assert "prefill worker prefill-0 failed with an unexpected error" in message


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event(start_stack: StartStack) -> None:
    stack = await start_stack(max_attempts=1)
    stack.workers["decode-0"].fail_after, stack.workers["decode-0"].fail_code = 3, grpc.StatusCode.INTERNAL
    response = await stack.post("/v1/completions", prompt="x", stream=True)
    *_, last, done, _ = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert done == "data: [DONE]"
    with pytest.raises(openai.APIError, match="it failed once, after 4 tokens"):
        await Reader(stack).task


async def test_what_a_worker_can_never_do_is_the_client_s_fault(stack: Stack) -> None:
    decode = stack.workers["decode-0"]
    decode.fail_after, decode.fail_code = 0, grpc.StatusCode.INVALID_ARGUMENT
    response = await stack.post("/v1/completions", prompt="x")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the toy was told to fail")
    assert len(decode.calls) == 1


async def test_a_request_has_a_longest_life(start_stack: StartStack) -> None:
    stack = await start_stack(request_seconds=0.3)
    stack.pause_decode()
    response = await stack.post("/v1/completions", prompt="x")
    assert response.status_code == 503
    assert "took longer than 0.3 seconds" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_when_the_client_goes_the_work_stops(stack: Stack, stream: bool, path: str) -> None:
    stack.pause_decode()
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream, "max_tokens": 50}
    task = asyncio.create_task(stack.http.post(path, json=body))
    decode = stack.workers["decode-0"]
    await eventually(lambda: decode.active == 1)
    task.cancel()
    await eventually(lambda: decode.outcomes() == ["cancelled"])
    await eventually(stack.has_load(0))


async def test_when_the_client_goes_the_prefill_stops_too(stack: Stack) -> None:
    prefill = stack.workers["prefill-0"]
    prefill.pause_after = 0
    task = asyncio.create_task(stack.post("/v1/completions", prompt="x"))
    await eventually(lambda: prefill.active == 1)
    task.cancel()
    await eventually(lambda: prefill.outcomes() == ["cancelled"] == stack.workers["decode-0"].outcomes())


async def test_when_decode_fails_the_prefill_stops_at_once(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1, decode=2)
    prefill = stack.workers["prefill-0"]
    prefill.pause_after = 0
    task = asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0))
    await eventually(lambda: prefill.active == 1)
    first = next(w for w in stack.workers.values() if w.role == "decode" and w.calls)
    await first.crash()
    await eventually(lambda: prefill.outcomes()[0] == "cancelled")
    prefill.resume.set()
    assert (await task).json()["choices"][0]["text"] == TEXT[:9]


async def test_without_prefill_workers_decode_computes_the_prompt(stack: Stack) -> None:
    await stack.workers["prefill-0"].stop()
    answer = (await stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0)).json()
    assert answer["choices"][0]["text"] == TEXT[:9]
    assert stack.workers["decode-0"].calls[-1].commands == ["prefill_here"]


async def test_a_short_prompt_is_computed_where_it_is_decoded(start_stack: StartStack) -> None:
    stack = await start_stack(local_prefill_tokens=64)
    answer = (await stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0)).json()
    assert answer["choices"][0]["text"] == TEXT[:9]
    assert stack.workers["decode-0"].calls[-1].commands == ["prefill_here"]
    assert stack.workers["prefill-0"].calls == []


async def test_workers_that_refuse_cost_no_attempt(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1, max_attempts=1)
    decode = stack.workers["decode-0"]
    await decode.crash()
    task = asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0))
    await eventually(stack.has_load(1))
    await decode.stop()
    await stack.add("decode", "decode-0", port=decode.port)
    assert (await task).json()["choices"][0]["text"] == TEXT[:9]


async def test_workers_of_another_model_get_nothing(start_stack: StartStack) -> None:
    stack = await start_stack(decode=0, prefill=0, queue_seconds=0.2)
    stranger = ToyWorker("decode", "stranger")
    stranger.model = "another"
    stack.workers["stranger"] = await stranger.start(stack.redis_url, stack.cluster)
    await eventually(stack.sees_all)
    response = await stack.post("/v1/completions", prompt="x")
    assert (response.status_code, stranger.calls) == (503, [])


@pytest.mark.slow
async def test_a_worker_that_failed_is_used_again(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0)
    decode = stack.workers["decode-0"]
    decode.fail_after = 3
    reader = Reader(stack, max_tokens=6)
    await eventually(lambda: "failed" in decode.outcomes())
    decode.fail_after = None
    assert await reader.task == TEXT[:6]


async def test_a_cancellation_that_nobody_has_asked_for_is_answered(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*arguments: object) -> None:
        raise asyncio.CancelledError

    stack = await start_stack(prefill=0)
    monkeypatch.setattr(SequenceRunner, "run", run)
    answer = await stack.post("/v1/completions", prompt="x")
    assert (answer.status_code, "unexpected reason" in answer.text) == (503, True)
