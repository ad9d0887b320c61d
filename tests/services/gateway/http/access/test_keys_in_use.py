"""Keys of a file at a real gateway: what a key sees, ends, may use, and how urgent its requests are."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.services.common.wire import context_from_pb
from paceline.services.gateway.http.access import keys as key_module
from tests.services.gateway.computed_routes import bodies
from tests.services.gateway.conftest import Stack, StartStack, eventually

FILE = """
[alice]
key = "key-of-alice"
[bob]
key = "key-of-bob"
priority = 5
[eve]
key = "key-of-eve"
priority = -5
requests_per_minute = 2
tokens_per_minute = 100
[slow]
key = "key-of-slow"
max_concurrent = 1
[root]
key = "key-of-root"
role = "admin"
[carol]
key = "key-of-carol"
share_cache = "team"
[dave]
key = "key-of-dave"
share_cache = "team"
"""
SECRETS = ("key-of-alice", "key-of-bob", "key-of-eve", "key-of-slow", "key-of-root", "key-of-nobody")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(FILE)
    return file


@pytest.fixture
async def stack(start_stack: StartStack, keys: Path) -> Stack:
    stack = await start_stack(api_keys_file=str(keys), store=f"{keys.parent}/responses.db")
    stack.workers["decode-0"].max_seqs = 8
    return stack


@pytest.fixture
async def scoring(start_stack: StartStack, keys: Path) -> Stack:
    """A stack that can score."""
    return await start_stack(api_keys_file=str(keys), store=f"{keys.parent}/responses.db", score_tokens="y,n")


async def post(stack: Stack, name: str, path: str = "/v1/completions", /, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer key-of-{name}"}
    if path == "/v1/completions":
        body = {"prompt": "x", "max_tokens": 2, **body}
    return await stack.http.post(path, json=body, headers=headers)


async def get(stack: Stack, name: str, path: str) -> httpx.Response:
    return await stack.http.get(path, headers={"x-api-key": f"key-of-{name}"})


def salts(stack: Stack) -> set[str]:
    """Return the salts of all work that came since the last call."""
    works = [call.work for worker in stack.workers.values() for call in worker.calls]
    for worker in stack.workers.values():
        worker.calls.clear()
    return {work.cache_salt for work in works}


async def test_the_blocks_of_a_key_are_its_own_on_every_route(scoring: Stack) -> None:
    async def salt(name: str, path: str, **fields: str) -> str:
        answer = await post(scoring, name, path, **bodies("hello")[path], **fields)
        assert answer.status_code == 200, answer.text
        (found,) = salts(scoring)
        return found

    names = ("alice", "bob", "root", "carol", "dave")
    found = {(await salt(name, path), name) for path in bodies("") for name in names}
    assert len(found) == len(names), "a key has one salt on all routes"
    alice, _, _, carol, dave = (next(own for own, name in found if name == wanted) for wanted in names)
    assert carol == dave
    assert len({own for own, _ in found} - {""}) == 4
    for path in bodies(""):
        if "scor" not in path and "rerank" not in path:
            # No client can choose the salt of another one.
            chosen = [await salt(name, path, cache_salt=alice) for name in ("alice", "bob", "carol", "dave")]
            assert len({*chosen, alice, carol}) == 5
            assert chosen[2] == chosen[3]


async def test_the_blocks_of_lines_and_of_responses_in_the_background_are_their_keys_own(stack: Stack) -> None:
    await post(stack, "alice")
    (own,) = salts(stack)
    made = await post(stack, "alice", "/v1/responses", input="x", background=True, max_output_tokens=2)
    assert made.status_code == 200, made.text
    decode = stack.workers["decode-0"]
    await eventually(lambda: len(decode.calls) == 1 and not decode.active)
    assert salts(stack) == {own}
    headers = {"x-api-key": "key-of-alice"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    uploaded = await stack.http.post(
        "/v1/files", files={"file": json.dumps(line).encode()}, data={"purpose": "batch"}, headers=headers
    )
    batch = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await stack.http.post("/v1/batches", json=batch, headers=headers)).status_code == 200
    await eventually(lambda: len(decode.calls) == 1 and not decode.active)
    assert salts(stack) == {own}


async def test_all_gateways_give_a_key_the_same_salt(stack: Stack) -> None:
    other = await stack.another_gateway()
    await post(stack, "alice")
    own = salts(stack)
    answer = await other.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-api-key": "key-of-alice"})
    assert answer.status_code == 200
    assert salts(stack) == own != {""}


async def test_all_keys_may_share_their_blocks(start_stack: StartStack, keys: Path) -> None:
    stack = await start_stack(api_keys_file=str(keys), share_cache=True)
    for name in ("alice", "bob", "carol"):
        await post(stack, name)
    assert len(salts(stack)) == 1
    await post(stack, "alice", cache_salt="x")
    await post(stack, "bob", cache_salt="y")
    assert len(salts(stack)) == 2


async def test_shared_prompts_are_shared_by_all_keys(start_stack: StartStack, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "shared.toml").write_text(f'[a]\ntext = "{"system " * 8}"')
    stack = await start_stack(api_keys_file=str(keys), shared_prompts=str(tmp_path / "shared.toml"))
    for name, text in (("alice", "my PIN is 4711"), ("bob", "my PIN is 4712"), ("bob", "")):
        messages = [{"role": "system", "content": "system " * 8 + text}, {"role": "user", "content": "x"}]
        await post(stack, name, "/v1/chat/completions", messages=messages, max_tokens=2)
    works = [call.work for call in stack.workers["prefill-0"].calls]
    assert [work.shared_tokens for work in works] == [64, 64, 64]
    contexts = [context_from_pb(work).links("layout") for work in works]
    assert contexts[0][:4] == contexts[1][:4] == contexts[2][:4]
    assert contexts[0][4] != contexts[1][4]


async def test_a_key_sees_its_own_traces_only(stack: Stack) -> None:
    for name in ("alice", "bob"):
        assert (await post(stack, name, prompt=f"from {name}", request_id="chosen")).status_code == 200
    traces = {name: await get(stack, name, "/trace/chosen") for name in ("alice", "bob", "root", "eve")}
    assert [each.status_code for each in traces.values()] == [200, 200, 200, 404]
    assert traces["alice"].json()["own_id"] != traces["bob"].json()["own_id"] == traces["root"].json()["own_id"]
    assert traces["alice"].json()["earlier"] == traces["bob"].json()["earlier"] == []
    assert traces["root"].json()["earlier"] == [traces["alice"].json()["own_id"]]
    unknown = (await get(stack, "eve", "/trace/unknown")).json()["error"]["message"]
    assert traces["eve"].json()["error"]["message"] == unknown.replace("unknown", "chosen", 1)


async def test_a_key_ends_its_own_requests_only(stack: Stack) -> None:
    stack.pause_decode(after=1)
    decode = stack.workers["decode-0"]
    requests = [asyncio.create_task(post(stack, name, max_tokens=50, request_id="chosen")) for name in ("alice", "bob")]
    await eventually(lambda: decode.active == 2)
    assert (await post(stack, "eve", "/abort_requests", request_ids=["chosen"])).status_code == 200
    assert (await post(stack, "alice", "/abort_requests", request_ids=["chosen"])).status_code == 200
    assert (await requests[0]).json()["choices"][0]["finish_reason"] == "abort"
    await eventually(lambda: decode.active == 1)
    assert (await post(stack, "root", "/abort_requests", request_ids=["chosen"])).status_code == 200
    assert (await requests[1]).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_key_sees_its_own_responses_only(stack: Stack) -> None:
    made = await post(stack, "alice", "/v1/responses", input="x", max_output_tokens=2)
    assert made.status_code == 200, made.text
    path = f"/v1/responses/{made.json()['id']}"
    assert [(await get(stack, name, path)).status_code for name in ("alice", "bob", "root")] == [200, 404, 404]


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("alice", None, 0),
        ("alice", -9, 0),
        ("alice", 9, 9),
        ("bob", None, 5),
        ("bob", 0, 5),
        ("bob", 7, 7),
        ("eve", None, -5),
        ("eve", 0, 0),
        ("eve", -6, -5),
    ],
)
async def test_a_key_may_only_be_less_urgent(stack: Stack, name: str, wanted: int | None, expected: int) -> None:
    assert (await post(stack, name, **({} if wanted is None else {"priority": wanted}))).status_code == 200
    assert stack.workers["decode-0"].calls[-1].work.priority == expected
    headers = {} if wanted is None else {"x-vllm-priority": str(wanted)}
    headers["x-api-key"] = f"key-of-{name}"
    assert (await stack.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
    assert stack.workers["decode-0"].calls[-1].work.priority == expected


async def test_requests_beyond_the_limit_have_to_wait(stack: Stack) -> None:
    first = await post(stack, "eve", prompt="four", max_tokens=3)
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await post(stack, "eve")).status_code == 200
    refused = await post(stack, "eve")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "requests")
    assert 59 <= int(refused.headers["retry-after"]) <= 69
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(100 - 4 - 3 - 1 - 2)
    assert (await get(stack, "eve", "/v1/models")).status_code == 200, "only requests with a body are limited"
    assert "x-ratelimit-limit-requests" not in (await post(stack, "alice")).headers
    anthropic = await post(stack, "eve", "/v1/messages", messages=[], max_tokens=1)
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/completions/render", {"prompt": "x"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/conversations", {}),
    ],
)
async def test_requests_that_no_worker_computes_are_limited_as_well(stack: Stack, path: str, body: Any) -> None:
    answers = [await post(stack, "eve", path, **body) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert (await post(stack, "eve", "/abort_requests", request_ids=[])).status_code == 200, "this ends requests"


async def test_tokens_beyond_the_limit_have_to_wait(stack: Stack) -> None:
    assert (await post(stack, "eve", prompt="x" * 101)).status_code == 400
    assert (await post(stack, "eve", prompt="x" * 90, max_tokens=10)).status_code == 200


async def test_a_stream_counts_and_its_refusal_has_a_status(stack: Stack) -> None:
    assert (await post(stack, "eve", prompt="x" * 90, max_tokens=10, stream=True)).status_code == 200
    refused = await post(stack, "eve", prompt="x" * 20, max_tokens=10, stream=True)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")


async def test_only_so_many_requests_of_a_key_run_at_a_time(stack: Stack) -> None:
    stack.pause_decode(after=1)
    decode = stack.workers["decode-0"]
    running = asyncio.create_task(post(stack, "slow", max_tokens=5))
    await eventually(lambda: decode.active == 1)
    assert (await post(stack, "slow")).status_code == 429
    decode.resume.set()
    assert (await running).status_code == 200
    assert (await post(stack, "slow")).status_code == 200


async def test_a_response_in_the_background_runs_until_its_own_end(stack: Stack) -> None:
    stack.pause_decode(after=1)
    made = await post(stack, "slow", "/v1/responses", input="x", background=True, max_output_tokens=5)
    assert made.status_code == 200, made.text
    await eventually(lambda: stack.workers["decode-0"].active == 1)
    assert (await post(stack, "slow")).status_code == 429
    stack.workers["decode-0"].resume.set()

    async def is_free() -> bool:
        return (await post(stack, "slow")).status_code == 200

    await eventually(is_free)


async def test_a_key_that_is_removed_is_refused(stack: Stack, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "LOOK_SECONDS", 0.05)
    await asyncio.to_thread(keys.write_text, '[root]\nkey = "key-of-root"\nrole = "admin"\n[bob]\nkey = "key-of-bob"')

    async def is_refused() -> bool:
        return (await get(stack, "alice", "/v1/models")).status_code == 401

    await eventually(is_refused)
    assert (await get(stack, "bob", "/v1/models")).status_code == 200


async def test_no_key_is_ever_shown(start_stack: StartStack, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "paceline"):
        stack = await start_stack(api_keys_file=str(keys), api_key="given-to-alice", admin_key="given-to-root")
        told = []
        for name in ("alice", "nobody", "root"):
            told += [await get(stack, name, path) for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing")]
            told += [await get(stack, name, path) for path in ("/server_info", "/fleet", "/fleet/scale")]
            told.append(await post(stack, name))
            told.append(await post(stack, name, prompt=None))
            told.append(await stack.http.post("/v1/completions", content=b"{", headers={"x-api-key": f"key-of-{name}"}))
    assert {answer.status_code for answer in told} >= {200, 400, 401, 403, 404}
    seen = caplog.text + "".join(f"{answer.headers} {answer.text}" for answer in told)
    assert not [secret for secret in (*SECRETS, "given-to-alice", "given-to-root") if secret in seen]


async def test_reads_are_limited_apart_from_other_requests(stack: Stack) -> None:
    eve = {"Authorization": "Bearer key-of-eve"}
    answers = [await stack.http.get("/v1/files?limit=1", headers=eve) for _ in range(2 * 10 + 1)]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert (await stack.http.delete("/v1/files/none", headers=eve)).status_code == 429
    assert (await stack.http.post("/tokenize", json={"prompt": "x"}, headers=eve)).status_code == 200
