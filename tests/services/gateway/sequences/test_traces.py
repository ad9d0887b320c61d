"""What `GET /trace/{id}` and `paceline trace` show of a request: while it runs, after its end, and after failures."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import pytest

from paceline.client import GatewayClient
from paceline.core.errors import InvalidRequestError
from paceline.core.types import SamplingParams
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.sequences import worker_call
from paceline.services.gateway.sequences.traces import ATTEMPTS_KEPT, SEQUENCES_KEPT, RequestTrace, SequenceTrace
from paceline.services.gateway.telemetry.trace_book import TraceBook
from paceline.trace import trace as print_trace
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.toy_calls import ADMISSION
from tests.services.gateway.toy_scope import toy_scope

PROMPT = "a prompt of some tokens"


async def trace(stack: Stack, request_id: str) -> dict[str, Any]:
    response = await stack.http.get(f"/trace/{quote(request_id, safe='')}")
    assert response.status_code == 200, response.text
    return dict(response.json())


async def ended(stack: Stack, request_id: str) -> dict[str, Any]:
    """Return the trace when the request has ended for the gateway, which may be later than for the client."""
    told: dict[str, Any] = {}

    async def is_over() -> bool:
        told.update(await trace(stack, request_id))
        return bool(told["state"] != "running")

    await eventually(is_over)
    return told


def instants(value: Any) -> list[float]:
    """Return all points in time in a trace, in milliseconds."""
    if isinstance(value, list):
        return [instant for item in value for instant in instants(item)]
    if not isinstance(value, dict):
        return []
    own = [item for name, item in value.items() if name.endswith("_ms") and name not in DURATIONS and item is not None]
    return own + [instant for item in value.values() for instant in instants(item)]


DURATIONS = ("steps_ms", "step_ms", "p50_ms", "p99_ms", "max_ms")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_from_its_arrival_to_its_end(stack: Stack, stream: bool) -> None:
    answer = await stack.post(
        "/v1/completions", prompt=PROMPT, max_tokens=20, seed=0, stream=stream, temperature=0, stop=["§"]
    )
    told = await ended(stack, answer.headers["x-request-id"])
    assert (told["state"], told["endpoint"], told["streamed"]) == ("finished", "/v1/completions", stream)
    assert (told["asked"]["sampling"], told["asked"]["stop_strings"], told["sequences"]) == ("greedy", 1, 1)
    (part,) = told["parts"]
    assert (part["prompt_tokens"], part["max_tokens"], part["end"]["reason"]) == (23, 20, "length")
    assert (part["end"]["generated_tokens"], part["end"]["attempts"]) == (20, 1)
    (attempt,) = part["attempts"]
    assert attempt["queue"]["waited_for"] == {}
    assert attempt["admission"]["decode"] == {"worker": "decode-0", "host": "host", "numerics": None}
    assert attempt["admission"]["prefill"] == {"worker": "prefill-0", "host": "host", "numerics": None}
    admission = attempt["admission"]
    assert [admission[name] for name in ("context_tokens", "cached_tokens", "blocks", "cached_blocks")] == [
        23,
        16,
        5,
        1,
    ]
    prefill = attempt["prefill"]
    assert (prefill["tokens"], prefill["steps"], prefill["steps_ms"]) == (23, 6, 3.0)
    assert [(chunk["first"], chunk["tokens"]) for chunk in prefill["chunks"]] == [
        (0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (20, 3),
    ]  # fmt: skip
    assert {chunk["worker"] for chunk in prefill["chunks"]} == {"prefill-0"}
    handoff = attempt["handoff"]
    assert (handoff["blocks"], handoff["bytes_moved"], handoff["path"]) == (3, 12288, "carrier pigeon")
    assert handoff["adopted_ms"] == pytest.approx(handoff["told_ms"] + 0.01, abs=0.002)
    decode = attempt["decode"]
    assert (decode["tokens"], decode["steps"], decode["draft_tokens"], decode["accepted_tokens"]) == (19, 19, 9, 5)
    assert decode["preemptions"] == 2
    assert 0 <= decode["between_tokens"]["p50_ms"] <= decode["between_tokens"]["max_ms"]
    order = [
        part["began_ms"], attempt["queue"]["began_ms"], admission["asked_ms"], admission["at_ms"],
        attempt["first_token_ms"], handoff["filled_ms"], handoff["told_ms"], decode["first_token_ms"],
        decode["last_token_ms"], part["end"]["at_ms"],
    ]  # fmt: skip
    assert order == sorted(order)
    assert all(0 <= instant <= told["ms"] for instant in instants(told))


async def test_the_command_prints_a_timeline_and_json(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    answer = await stack.post("/v1/completions", prompt=PROMPT, max_tokens=20, request_id="mine/../1?#%41")
    await ended(stack, answer.json()["id"])
    await asyncio.to_thread(print_trace, answer.json()["id"], GatewayClient(stack.url), False)
    text = capsys.readouterr().out
    rows = [line[12:23].strip() for line in text.splitlines() if line[:1] == " "]
    assert [row for row, _ in itertools.groupby(rows)] == [
        "begin", "queue", "attempt 1", "admitted", "prefill", "chunk", "first token", "filled", "handoff", "decode",
        "end",
    ]  # fmt: skip
    for part in ("prefill-0 on host", "decode-0 on host", "12288 bytes moved, path: carrier pigeon", "6 chunks"):
        assert part in text
    assert "5 of 9 drafts accepted; 2 preemptions" in text
    await asyncio.to_thread(print_trace, "mine/../1?#%41", GatewayClient(stack.url), True)
    assert json.loads(capsys.readouterr().out)["request_id"] == "mine/../1?#%41"
    with pytest.raises(InvalidRequestError, match="404: this gateway does not know the request 'nobody'"):
        await asyncio.to_thread(print_trace, "nobody", GatewayClient(stack.url), False)


@pytest.mark.parametrize("name", ["nobody", "..", "a/b", "%", "ü✓", "x" * 5000, "cmpl-1-7", "r-99999999999999"])
async def test_an_unknown_id_is_said_to_be_unknown(stack: Stack, name: str) -> None:
    path = "/trace/" + quote(name, safe="").replace(".", "%2E")
    response = await stack.http.get(httpx.URL(stack.url).copy_with(raw_path=path.encode()))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unknown_request")
    assert len(error["message"]) < 500
    assert "ask the one that served it" in error["message"]


async def test_a_running_request_is_told_so_far(stack: Stack) -> None:
    stack.workers["decode-0"].pause_after = 5
    reader = Reader(stack, max_tokens=30, extra_headers={"x-request-id": "slow"})
    await eventually(lambda: len(reader.text) == 6)
    told = await trace(stack, "slow")
    (part,) = told["parts"]
    assert (told["state"], part["end"]) == ("running", None)
    decode = part["attempts"][0]["decode"]
    assert (decode["tokens"], decode["steps"]) == (5, None)
    assert decode["between_tokens"]["max_ms"] >= 0
    stack.workers["decode-0"].resume.set()
    await reader.task
    assert (await ended(stack, "slow"))["state"] == "finished"


async def test_a_waiting_request_says_why_it_waits(stack: Stack) -> None:
    stack.workers["decode-0"].max_seqs = 0
    task = asyncio.create_task(stack.http.post("/v1/completions", json={"prompt": "x", "request_id": "patient"}))

    async def waits_again() -> bool:  # and does not ask a worker just now
        response = await stack.http.get("/trace/patient")
        attempts = response.json()["parts"][0]["attempts"] if response.status_code == 200 else []
        queues = [each["queue"] for each in attempts if (each["admission"], each["decode"]) == (None, None)]
        return any("this toy is full" in each["waited_for"] and each["ms"] is None for each in queues)

    await eventually(waits_again)
    task.cancel()
    assert (await ended(stack, "patient"))["state"] == "client gone"


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_failed_attempt_is_told_with_its_reason(start_stack: StartStack, role: str) -> None:
    stack = await start_stack(prefill=2, decode=2)
    failing = stack.workers[f"{role}-0"]
    failing.fail_after, failing.fail_code = 1, grpc.StatusCode.INTERNAL
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)
    (part,) = (await ended(stack, answer.json()["id"]))["parts"]
    first, second = part["attempts"]
    assert first["failure"]["reason"] == f"{role} worker {role}-0 failed with an unexpected error; its log has it"
    assert first["admission"]["decode"]["worker"] == "decode-0"
    assert second["admission"][role]["worker"] == f"{role}-1"
    assert (first["attempt"], second["attempt"], second["failure"]) == (1, 2, None)
    sent = 2 if role == "decode" else 1
    assert second["admission"]["context_tokens"] == 1 + sent
    assert (part["end"]["attempts"], part["end"]["generated_tokens"]) == (2, 30)


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_an_attempt_whose_worker_hangs_is_counted_with_its_own_time(
    start_stack: StartStack, role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_call, "QUIET_SECONDS", 0.1)
    stack = await start_stack(prefill=2, decode=2)
    still = stack.workers[f"{role}-0"]
    still.pause_after = ADMISSION
    await still.serve_health(False)
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)
    told = await ended(stack, answer.json()["id"])
    (part,) = told["parts"]
    first, second = part["attempts"]
    assert (first["asked"][role]["worker"], first["admission"], first["outcome"]) == (f"{role}-0", None, "failed")
    assert first["failure"]["reason"].startswith(f"{role} worker {role}-0 hangs")
    assert first["queue"]["waited_for"] == second["queue"]["waited_for"] == {}
    hung = first["failure"]["at_ms"] - first["asked"]["at_ms"]
    assert hung >= 90 > first["queue"]["ms"] + second["queue"]["ms"]
    assert second["queue"]["began_ms"] >= first["ended_ms"]
    assert (second["asked"][role]["worker"], second["outcome"], second["failure"]) == (f"{role}-1", "finished", None)
    assert part["end"]["attempts"] == 2
    await asyncio.to_thread(print_trace, answer.json()["id"], GatewayClient(stack.url), False)
    text = capsys.readouterr().out
    assert "30 tokens in 2 attempts" in text
    assert f"FAILED      {role} worker {role}-0 hangs" in text
    counts = (await stack.http.get("/metrics")).text
    for outcome, number in (("finished", 1), ("failed", 1), ("cancelled", 0)):
        assert f'request_attempts_total{{model_name="toy",outcome="{outcome}"}} {number}.0' in counts


async def test_an_attempt_that_no_worker_has_answered_is_cancelled_with_its_client(stack: Stack) -> None:
    still = stack.workers["decode-0"]
    still.pause_after = ADMISSION
    body = {"prompt": "x", "max_tokens": 9, "request_id": "early"}
    task = asyncio.create_task(stack.http.post("/v1/completions", json=body))
    await eventually(lambda: bool(still.calls))
    task.cancel()
    (part,) = (await ended(stack, "early"))["parts"]
    (attempt,) = part["attempts"]
    assert (attempt["asked"]["decode"]["worker"], attempt["outcome"]) == ("decode-0", "cancelled")
    assert (part["end"]["attempts"], attempt["failure"]["at_ms"] >= attempt["asked"]["at_ms"]) == (1, True)


def test_attempts_that_no_worker_admits_are_counted_after_the_first_ones() -> None:
    record = SequenceTrace()
    for number in range(3 * ATTEMPTS_KEPT):
        attempt = record.begin_attempt(0)
        attempt.ask(None, None, number, 1)
        attempt.end("failed", "gone")
    record.begin_attempt(0).ask(None, None, 0, 1)
    record.end_attempt("stop", "")
    assert (len(record.tries), record.attempts) == (ATTEMPTS_KEPT, 3 * ATTEMPTS_KEPT + 1)
    assert record.outcomes == {"failed": 3 * ATTEMPTS_KEPT, "finished": 1}


@pytest.mark.slow
async def test_a_request_that_fails_says_why(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, max_attempts=2)
    stack.workers["decode-0"].fail_after = 0
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=5)
    assert answer.status_code == 503
    told = await ended(stack, answer.headers["x-request-id"])
    end = told["parts"][0]["end"]
    assert (told["state"], end["reason"], end["attempts"]) == ("failed", "error", 2)
    assert end["why"].startswith("the request was given up because it failed 2 times")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_is_seen(stack: Stack, stream: bool) -> None:
    stack.workers["decode-0"].pause_after = 3
    body = {"prompt": "x", "max_tokens": 9, "request_id": "gone", "stream": stream}
    task = asyncio.create_task(stack.http.post("/v1/completions", json=body))
    await eventually(lambda: bool(stack.workers["decode-0"].calls))
    task.cancel()
    told = await ended(stack, "gone")
    assert (told["state"], told["parts"][0]["end"]["reason"]) == ("client gone", "abort")


async def test_a_stop_string_and_a_structured_output_are_named_but_not_quoted(stack: Stack) -> None:
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0, stop=["brown"])
    told = await ended(stack, answer.json()["id"])
    assert told["parts"][0]["end"]["why"] == "a stop string"
    assert "brown" not in json.dumps(told)
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=3, structured_outputs={"regex": "secret.*"})
    told = await ended(stack, answer.json()["id"])
    assert told["asked"]["structured_output"] == "regex"
    assert "secret" not in json.dumps(told)


async def test_choices_are_parts_of_one_trace(stack: Stack) -> None:
    answer = await stack.post("/v1/completions", prompt=["ab", "abc"], n=2, max_tokens=4, temperature=1)
    request_id = answer.json()["id"]
    told = await ended(stack, request_id)
    assert [part["index"] for part in told["parts"]] == [0, 1, 2, 3]
    assert [part["prompt_tokens"] for part in told["parts"]] == [2, 2, 3, 3]
    assert told["asked"]["sampling"] == "random"
    # The id of one sequence, which leases and logs show, finds the trace of its request.
    assert (await trace(stack, f"{request_id}-3"))["request_id"] == request_id
    assert (await stack.http.get(f"/trace/{request_id}-4")).status_code == 404


async def test_an_id_that_a_client_repeats_leads_to_the_newest_and_names_the_others(stack: Stack) -> None:
    for max_tokens in (1, 2, 3):
        await stack.post("/v1/completions", prompt="x", max_tokens=max_tokens, request_id="again")
    told = await ended(stack, "again")
    assert told["parts"][0]["max_tokens"] == 3
    before, first = told["earlier"]
    assert [(await trace(stack, name))["parts"][0]["max_tokens"] for name in (before, first)] == [2, 1]
    assert (await trace(stack, first))["earlier"] == []


def request(name: str, sequences: int = 1, own_id: str = "") -> RequestTrace:
    prompt = PromptPlan(text=None, token_ids=[1], sampling=SamplingParams())
    plan = Plan(prompts=[prompt], n=sequences, stop=(), include_stop=False, skip_special_tokens=True, cache_salt="")
    trace = RequestTrace.of(plan, toy_scope(name, arrived=0.0), endpoint="/v1/completions", model="", streamed=False)
    trace.own_id = own_id or f"{name}-own"
    return trace


def run(book: TraceBook, trace: RequestTrace) -> None:
    book.open(trace)
    for index in range(trace.sequences):
        trace.begin(index, 1, 1).end("stop", "", 1)
    book.close(trace)


def test_the_oldest_ended_ones_make_room_and_running_ones_stay() -> None:
    book = TraceBook(kept=5)
    assert book.requests.count == 0
    running = request("running")
    book.open(running)
    for name in "abcdefgh":
        run(book, request(name))
    assert [name for name in "abcdefgh" if book.find(name)] == list("defgh")
    assert book.find("running") is running
    assert book.requests.count == 1
    run(book, request("many", sequences=4))
    assert [name for name in "abcdefgh" if book.find(name)] == ["h"]
    assert (len(book._by_id), book._sequences) == (2 * 3, 5)
    book.close(running)
    assert book.requests.count == 0


def test_a_client_that_always_has_the_same_id_takes_no_more_room() -> None:
    book = TraceBook(kept=5)
    traces = [request("same", own_id=f"own-{index}") for index in range(20)]
    for each in traces:
        run(book, each)
    assert book._by_id["same"] == traces[-5:]
    assert len(book._by_id) == 6
    assert book.earlier(traces[-1]) == traces[-2:-6:-1]


def test_a_request_without_any_sequence_takes_room_too() -> None:
    book = TraceBook(kept=5)
    for index in range(20):
        nothing = request(f"{index}")
        book.open(nothing)
        book.close(nothing)
    assert len(book._by_id) == 10
    assert nothing.outcome == "client gone"


def test_a_request_of_very_many_sequences_is_cut() -> None:
    book = TraceBook()
    many = request("many", sequences=SEQUENCES_KEPT + 7)
    run(book, many)
    assert (len(many.traces), many.left_out, many.outcome) == (SEQUENCES_KEPT, 7, "finished")
