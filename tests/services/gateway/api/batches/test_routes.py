"""Files and batches through the `openai` SDK."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline.services.gateway.api.batches import routes, runner
from tests.services.gateway.api.batches.conftest import StartBatches, content, ended, line, submit
from tests.services.gateway.conftest import Reader, Stack, eventually
from tests.services.gateway.queueing.test_worker_wait import add_planner, waits_for_worker


@pytest.fixture
async def stack(start_batches: StartBatches) -> Stack:
    return await start_batches()


async def upload(stack: Stack, data: bytes = b"{}\n", **options: Any) -> openai.types.FileObject:
    return await stack.openai.files.create(file=("in.jsonl", data), purpose="batch", **options)


async def test_a_file_is_kept_as_it_came(stack: Stack) -> None:
    data = bytes(range(256)) * 4000
    made = await upload(stack, data, expires_after={"anchor": "created_at", "seconds": 3600})
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(data), "in.jsonl", "batch", "processed")
    assert made.expires_at == made.created_at + 3600
    assert await stack.openai.files.retrieve(made.id) == made
    answer = await stack.openai.files.with_raw_response.content(made.id)
    assert (answer.content, answer.headers["content-length"]) == (data, str(len(data)))
    assert (await stack.openai.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await stack.openai.files.retrieve(made.id)


async def test_files_are_listed_in_pages(stack: Stack) -> None:
    made = [(await upload(stack)).id for _ in range(5)]
    assert [file.id async for file in stack.openai.files.list(limit=2)] == made[::-1]
    page = await stack.openai.files.list(limit=2, order="asc", after=made[0])
    assert ([file.id for file in page.data], page.has_more) == (made[1:3], True)
    assert (await stack.openai.files.list(purpose="batch_output")).data == []


@pytest.mark.parametrize(
    ("data", "headers", "message"),
    [
        (b"nonsense", {"content-type": "multipart/form-data; boundary=x"}, "not valid multipart"),
        (b"{}", {"content-type": "application/json"}, "multipart/form-data"),
    ],
)
async def test_an_upload_that_is_none_is_refused(
    stack: Stack, data: bytes, headers: dict[str, str], message: str
) -> None:
    answer = await stack.http.post("/v1/files", content=data, headers=headers)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert (await stack.openai.files.list()).data == []


@pytest.mark.parametrize(
    ("options", "status"),
    [({"stored_files": 1}, 400), ({"stored_files_size": "700KiB"}, 400), ({"max_file_size": "300KiB"}, 413)],
)
async def test_files_have_limits(start_batches: StartBatches, options: dict[str, Any], status: int) -> None:
    stack = await start_batches(**options)
    first = await upload(stack, b"x" * 250_000)
    with pytest.raises(openai.APIStatusError) as caught:
        await upload(stack, b"x" * 500_000)
    assert caught.value.status_code == status
    assert [file.id for file in (await stack.openai.files.list()).data] == [first.id]


async def test_answers_that_are_never_deleted_leave_no_room_for_further_batches(start_batches: StartBatches) -> None:
    stack = await start_batches(stored_files=1)
    batch = await ended(stack, (await submit(stack, [line("a")])).id)
    fields: Any = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": batch.input_file_id}
    with pytest.raises(openai.BadRequestError, match="--stored-files"):
        await stack.openai.batches.create(**fields)
    await stack.openai.files.delete(str(batch.output_file_id))
    await stack.openai.batches.create(**fields)


async def test_a_batch_answers_each_line(stack: Stack) -> None:
    made = await submit(stack, [line("a"), line("b"), line("wrong", max_tokens=-1)], metadata={"who": "me"})
    assert made.status == "validating"
    batch = await ended(stack, made.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert (batch.metadata, batch.endpoint) == ({"who": "me"}, "/v1/completions")
    answers, errors = await content(stack, batch.output_file_id), await content(stack, batch.error_file_id)
    assert set(answers) == {"a", "b"}
    direct = await stack.openai.completions.create(model="toy", prompt="a", seed=0, max_tokens=4)
    response = answers["a"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["text"] == direct.choices[0].text
    assert response["body"]["usage"]["completion_tokens"] == 4
    assert errors["wrong"]["response"]["status_code"] == 400
    assert "max_tokens" in errors["wrong"]["response"]["body"]["error"]["message"]
    assert [each.id async for each in stack.openai.batches.list(limit=1)] == [made.id]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["a", "b"]}),
    ],
)
async def test_lines_may_be_of_other_endpoints(stack: Stack, endpoint: str, body: dict[str, Any]) -> None:
    lines = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "toy", **body}}]
    batch = await ended(stack, (await submit(stack, lines, endpoint=endpoint)).id)
    found = await content(stack, batch.output_file_id or batch.error_file_id)
    direct = await stack.http.post(endpoint, json={"model": "toy", **body})
    assert found["a"]["response"]["status_code"] == direct.status_code


async def test_an_input_file_that_is_wrong_fails_with_its_lines(stack: Stack) -> None:
    batch = await ended(stack, (await submit(stack, [line("a"), "nonsense", line("a")])).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    errors = [(error.code, error.line) for error in batch.errors.data or []]
    assert errors == [("invalid_json_line", 2), ("duplicate_custom_id", 3)]


async def test_a_request_that_comes_again_with_its_key_makes_nothing_new(stack: Stack) -> None:
    """The answer to the first one may have been lost after the store had committed it."""
    content = ("in.jsonl", json.dumps(line("a")).encode())
    headers: Any = {"extra_headers": {"Idempotency-Key": "key-1"}}
    files = [await stack.openai.files.create(file=content, purpose="batch", **headers) for _ in range(2)]
    assert files[0] == files[1]
    fields: Any = {"input_file_id": files[0].id, "endpoint": "/v1/completions", **headers}
    first = await stack.openai.batches.create(completion_window="24h", **fields)
    await ended(stack, first.id)
    again = await stack.openai.batches.create(completion_window="24h", **fields)
    assert (again.id, again.status) == (first.id, "completed")
    assert [each.id for each in (await stack.openai.batches.list()).data] == [first.id]
    with pytest.raises(openai.UnprocessableEntityError, match="take a new key"):
        await stack.openai.batches.create(completion_window="24h", metadata={"a": "b"}, **fields)
    with pytest.raises(openai.UnprocessableEntityError, match="take a new key"):
        await stack.openai.files.create(file=("in.jsonl", b"{}"), purpose="batch", **headers)
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        await stack.openai.files.create(file=content, purpose="batch", extra_headers={"Idempotency-Key": "a b"})


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"endpoint": "/v1/images/generations"}, 400),
        ({"endpoint": "/fleet"}, 400),
        ({"completion_window": "soon"}, 400),
        ({"input_file_id": "file-none"}, 404),
        ({"input_file_id": "\ud800"}, 400),
        ({"metadata": {"x" * 65: "y"}}, 400),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(stack: Stack, fields: dict[str, Any], status: int) -> None:
    file = await upload(stack)
    body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file.id, **fields}
    headers = {"content-type": "application/json"}
    answer = await stack.http.post("/v1/batches", content=json.dumps(body), headers=headers)
    assert answer.status_code == status


async def test_a_batch_that_is_cancelled_keeps_what_was_answered(stack: Stack) -> None:
    stack.pause_decode(after=2)
    made = await submit(stack, [line("short", max_tokens=1), line("long", max_tokens=20)])

    async def has_one() -> bool:
        counts = (await stack.openai.batches.retrieve(made.id)).request_counts
        return counts is not None and counts.completed == 1

    await eventually(has_one)
    with pytest.raises(openai.BadRequestError, match="still reads this file"):
        await stack.openai.files.delete(made.input_file_id)
    assert (await stack.openai.batches.cancel(made.id)).status == "cancelling"
    batch = await ended(stack, made.id)
    assert batch.status == "cancelled"
    assert set(await content(stack, batch.output_file_id)) == {"short"}
    with pytest.raises(openai.ConflictError):
        await stack.openai.batches.cancel(made.id)


async def test_lines_without_an_answer_expire(start_batches: StartBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "window_seconds", lambda window: 1)
    stack = await start_batches()
    stack.pause_decode(after=2)
    batch = await ended(stack, (await submit(stack, [line("short", max_tokens=1), line("long", max_tokens=20)])).id)
    assert batch.status == "expired"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    assert set(await content(stack, batch.output_file_id)) == {"short"}
    errors = await content(stack, batch.error_file_id)
    assert (errors["long"]["response"], errors["long"]["error"]["code"]) == (None, "batch_expired")


async def test_what_is_kept_expires(start_batches: StartBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CLEAN_SECONDS", 0.1)
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.1)
    stack = await start_batches(stored_files_seconds=1.0)
    batch = await ended(stack, (await submit(stack, [line("a")])).id)

    async def is_gone() -> bool:
        answer = await stack.http.get(f"/v1/batches/{batch.id}")
        return answer.status_code == 404

    await eventually(is_gone)
    assert batch.output_file_id is not None
    with pytest.raises(openai.NotFoundError):
        await stack.openai.files.retrieve(batch.output_file_id)


async def test_the_times_of_lines_are_not_those_of_clients(stack: Stack) -> None:
    await ended(stack, (await submit(stack, [line("a", max_tokens=7)])).id)
    metrics = (await stack.http.get("/metrics")).text
    assert 'paceline:generation_tokens_total{model_name="toy"} 7.0' in metrics
    assert 'paceline:time_to_first_token_seconds_count{model_name="toy"} 0.0' in metrics


async def test_another_gateway_goes_on(start_batches: StartBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEASE_SECONDS", 3.0)
    one = await start_batches()
    one.pause_decode(after=2)
    made = await submit(one, [line(f"short {n}", max_tokens=1) for n in range(5)] + [line("long", max_tokens=20)])

    async def has_five() -> bool:
        counts = (await one.openai.batches.retrieve(made.id)).request_counts
        return counts is not None and counts.completed == 5

    await eventually(has_five)
    one.stop.set()
    await one.gateway
    other = await start_batches()
    batch = await ended(other, made.id)
    assert batch.status == "completed"
    assert len(await content(other, batch.output_file_id)) == 6


async def test_lines_wait_for_a_worker(start_batches: StartBatches) -> None:
    stack = await start_batches(prefill=0, decode=0)
    made = await submit(stack, [line("a")])
    await asyncio.sleep(0.5)
    assert (await stack.openai.batches.retrieve(made.id)).status == "in_progress"
    await stack.add("decode", "d")
    assert (await ended(stack, made.id)).status == "completed"


async def test_a_line_waits_while_no_worker_is_ready_so_that_a_planner_starts_one(start_batches: StartBatches) -> None:
    stack = await start_batches(prefill=0, decode=0)
    await add_planner(stack, "decode")
    batch = await submit(stack, [line(name, prompt="x", max_tokens=2) for name in "ab"])
    await eventually(lambda: waits_for_worker(stack))
    await stack.add("decode", "d")
    assert (counts := (await ended(stack, batch.id)).request_counts) is not None
    assert (counts.completed, counts.failed) == (2, 0)


async def test_lines_leave_their_places_to_clients(start_batches: StartBatches) -> None:
    stack = await start_batches(prefill=0, decode=0)
    worker = await stack.add("decode", "d", max_seqs=4)
    await eventually(stack._is_healthy)
    stack.pause_decode(after=2)
    made = await submit(stack, [line(str(number), max_tokens=20) for number in range(8)])
    await eventually(stack.has_load(3))
    readers = [Reader(stack, max_tokens=2) for _ in range(4)]
    await asyncio.gather(*(reader.task for reader in readers))
    worker.pause_after = None
    worker.resume.set()
    batch = await ended(stack, made.id)
    assert batch.status == "completed"
    assert len(await content(stack, batch.output_file_id)) == 8


async def test_a_key_sees_only_what_is_its_own_and_an_admin_all(start_batches: StartBatches) -> None:
    stack = await start_batches(api_key="one,two", admin_key="root")
    stack.openai, two, root = (stack.openai.with_options(api_key=key) for key in ("one", "two", "root"))
    batch = await ended(stack, (await submit(stack, [line("a")])).id)
    assert batch.status == "completed"
    assert set(await content(stack, batch.output_file_id)) == {"a"}
    with pytest.raises(openai.NotFoundError):
        await two.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError):
        await two.files.content(str(batch.output_file_id))
    assert (await two.batches.list()).data == []
    assert (await two.files.list()).data == []
    assert [each.id for each in (await root.batches.list()).data] == [batch.id]
    assert len((await root.files.list()).data) == 2


async def test_lines_of_a_key_that_is_not_accepted_any_more_are_refused(start_batches: StartBatches) -> None:
    stack = await start_batches(prefill=0, decode=0, api_key="one")
    stack.openai = stack.openai.with_options(api_key="one")
    made = await submit(stack, [line("a")])
    stack.stop.set()
    await stack.gateway
    later = await start_batches(api_key="two", admin_key="root")
    later.openai = later.openai.with_options(api_key="root")
    batch = await ended(later, made.id)
    errors = await content(later, batch.error_file_id)
    assert errors["a"]["response"]["status_code"] == 401


async def test_without_a_store_there_are_no_batches(start_batches: StartBatches) -> None:
    stack = await start_batches(store="none")
    answer = await stack.http.get("/v1/batches")
    assert answer.status_code == 501
    assert "--store" in answer.json()["error"]["message"]
    assert json.loads((await stack.http.get("/openapi.json")).text)


def limited(folder: Path, **limits: int) -> str:
    """Return a file with one key, "one", that has limits."""
    file = folder / "keys.toml"
    file.touch(0o600)
    file.write_text("\n".join(['[one]\nkey = "one"', *(f"{name} = {value}" for name, value in limits.items())]))
    return str(file)


async def refusals(stack: Stack) -> float:
    metrics = (await stack.http.get("/metrics")).text
    counts = re.findall(r'^paceline:http_responses_total\{.*status="429"\} (\S+)$', metrics, re.MULTILINE)
    return sum(map(float, counts))


async def test_a_key_at_its_limit_tries_few_lines(start_batches: StartBatches, tmp_path: Path) -> None:
    # The upload and the batch itself count as two requests.
    stack = await start_batches(api_keys_file=limited(tmp_path, requests_per_minute=4))
    stack.openai = stack.openai.with_options(api_key="one")
    made = await submit(stack, [line(str(number)) for number in range(200)])

    async def is_at_the_limit() -> bool:
        counts = (await stack.openai.batches.retrieve(made.id)).request_counts
        return counts is not None and counts.completed == 2

    await eventually(is_at_the_limit)
    await asyncio.sleep(0.5)
    assert 0 < await refusals(stack) <= 20
    # For clients of the key, its lines have used nothing.
    for _ in range(2):
        await stack.openai.completions.create(model="toy", prompt="x", max_tokens=1)
    with pytest.raises(openai.RateLimitError):
        await stack.openai.completions.create(model="toy", prompt="x", max_tokens=1)


async def test_lines_go_on_one_after_another_if_a_key_may_run_only_one(
    start_batches: StartBatches, tmp_path: Path
) -> None:
    stack = await start_batches(api_keys_file=limited(tmp_path, max_concurrent=1))
    stack.openai = stack.openai.with_options(api_key="one")
    batch = await ended(stack, (await submit(stack, [line(str(number)) for number in range(20)])).id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 20
