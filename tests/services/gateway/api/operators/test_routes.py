"""Endpoints for operators, and rules that hold for every request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.parser import text_string_to_metric_families

import paceline
from paceline.client import GatewayClient
from paceline.services.gateway.telemetry import feed
from paceline.top import top
from tests.services.gateway.conftest import Stack, StartStack, eventually


async def metrics(stack: Stack) -> dict[str, float]:
    """Return the gateway's metrics by name, each summed over its labels."""
    text = (await stack.http.get("/metrics")).text
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0) + sample.value
    return samples


@pytest.mark.slow
async def test_health_is_whether_a_request_could_be_placed(start_stack: StartStack) -> None:
    stack = await start_stack(decode=0)
    assert (await stack.http.get("/health")).status_code == 503
    await stack.add("decode", "decode-0")

    async def healthy() -> bool:
        return (await stack.http.get("/health")).status_code == 200

    await eventually(healthy)
    stack.workers["decode-0"].state = "draining"

    async def sick() -> bool:
        return not await healthy()

    await eventually(sick)


@pytest.mark.slow
async def test_a_full_fleet_is_healthy(start_stack: StartStack) -> None:
    stack = await start_stack()
    for worker in stack.workers.values():
        worker.max_seqs = 1
        worker.pause_after = 0
    request = asyncio.create_task(stack.post("/v1/completions", model="toy", prompt="a", max_tokens=4))

    async def full() -> bool:
        fleet = (await stack.http.get("/fleet")).json()
        return all(worker["in_flight"] == worker["max_seqs"] for worker in fleet["workers"])

    await eventually(full)
    assert (await stack.http.get("/health")).status_code == 200
    for worker in stack.workers.values():
        worker.resume.set()
    assert (await request).status_code == 200


async def test_probes(stack: Stack) -> None:
    assert (await stack.http.get("/ping")).status_code == 200
    assert (await stack.http.head("/health")).status_code == 200
    assert (await stack.http.get("/version")).json() == {"version": paceline.__version__}
    assert (await stack.http.get("/load")).json() == {"server_load": 0}


async def test_the_server_s_own_description_has_no_secrets(start_stack: StartStack) -> None:
    stack = await start_stack(api_key="hidden", max_attempts=3)
    assert (await stack.http.get("/server_info")).status_code == 401
    info = await stack.http.get("/server_info", headers={"Authorization": "Bearer hidden"})
    about = info.json()
    assert (about["version"], about["model"], about["max_model_len"]) == (paceline.__version__, "toy", 512)
    assert (about["members"], about["options"]["max_attempts"]) == ({"decode": 1, "prefill": 1}, 3)
    assert about["weight_bytes"] == {"int4": 3000, "bfloat16": 1000}
    assert isinstance(about["numerics"], list)
    assert "hidden" not in info.text
    assert stack.redis_url not in info.text


async def test_models(stack: Stack) -> None:
    (card,) = (await stack.openai.models.list()).data
    assert (card.id, card.object, card.owned_by) == ("toy", "model", "paceline")
    assert (await stack.http.get("/v1/models/toy")).json()["max_model_len"] == 512


async def test_a_served_name_with_a_slash(start_stack: StartStack) -> None:
    stack = await start_stack(served_model_name="org/toy")
    assert (await stack.openai.models.retrieve("org/toy")).id == "org/toy"
    assert (await stack.openai.completions.create(model="org/toy", prompt="x", max_tokens=1)).model == "org/toy"


async def test_metrics_count_what_was_served(stack: Stack) -> None:
    await stack.add("kvtransfer", "kv-0")
    await stack.post("/v1/completions", prompt="abcd", max_tokens=5, n=2)
    await stack.post("/v1/completions", prompt="abcd", max_tokens=5, stop=["h", "i", "j"], seed=0)

    async def sees_the_host() -> bool:
        return (await metrics(stack))["paceline:worker_up"] == 3

    await eventually(sees_the_host)
    seen = await metrics(stack)
    assert seen["paceline:request_success_total"] == 3
    assert seen["paceline:prompt_tokens_total"] == seen["paceline:prefix_cache_queries_total"] == 12
    assert seen["paceline:prefix_cache_hits_total"] == 9
    assert seen["paceline:generation_tokens_total"] == 12
    assert seen["paceline:num_requests_running"] == seen["paceline:num_requests_waiting"] == 0
    assert seen["paceline:request_attempts_total"] == 3
    assert seen["paceline:num_preemptions_total"] == 4
    assert seen["paceline:kv_cache_usage_perc"] == 0.5 + 2 * 0.25  # of the arena, and of two workers' pools
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert seen[f"paceline:{name}_seconds_count"] == 3, name
    assert seen["paceline:request_decode_time_seconds_count"] == 3
    assert seen["paceline:request_inference_time_seconds_count"] == 3
    assert (seen["paceline:request_params_n_sum"], seen["paceline:request_params_n_count"]) == (3, 2)
    assert seen["paceline:request_params_max_tokens_sum"] == 10
    assert seen["paceline:request_prompt_tokens_sum"] == 12
    assert seen["paceline:request_generation_tokens_sum"] == 12
    assert seen["paceline:inter_token_latency_seconds_count"] > 0
    assert seen["paceline:handoff_seconds_count"] == seen["paceline:request_handoff_time_seconds_count"] == 3
    assert seen["paceline:request_handoff_time_seconds_sum"] <= seen["paceline:request_decode_time_seconds_sum"]


@pytest.mark.slow
async def test_the_fleet_with_the_ledger_of_each_host(stack: Stack) -> None:
    await stack.add("kvtransfer", "kv-0")
    silent = await stack.add("kvtransfer", "kv-1")
    silent.pause_after = 0

    async def sees_both() -> bool:
        return len((await stack.http.get("/fleet")).json()["hosts"]) == 2

    await eventually(sees_both)
    fleet = (await stack.http.get("/fleet")).json()
    assert [worker["worker_id"] for worker in fleet["workers"]] == ["decode-0", "kv-0", "kv-1", "prefill-0"]
    answering, unanswering = fleet["hosts"]
    assert (answering["free"], answering["held"], answering["in_flight"], answering["cached"]) == (4, 2, 3, 1)
    assert (answering["total"], answering["balanced"], answering["hit_rate"]) == (10, True, 0.25)
    assert answering["leases"][0]["key"]["request_id"] == "r"
    assert answering["leases"][0]["age_ms"] == 9
    assert answering["leases"][0]["blocks_by_group"] == {"full": 2}
    assert sum(owned["blocks"] for owned in answering["owners"]) == 5
    assert unanswering["error"]


@pytest.mark.slow
async def test_a_host_that_starts_again_while_its_ledger_is_asked_for_is_no_error(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "LEDGER_SECONDS", 60.0)
    leaving = await stack.add("kvtransfer", "kv-0")
    leaving.pause_after = 0

    async def view() -> httpx.Response:
        return await stack.http.get("/fleet")

    # Ask until the gateway knows the host. Then /fleet waits for the host's ledger.
    while (waiting := asyncio.create_task(view())) in (await asyncio.wait([waiting], timeout=1.0))[0]:
        assert waiting.result().json()["hosts"] == []
    await leaving.leave_redis()
    await stack.add("kvtransfer", "kv-0")
    answer = await waiting
    leaving.resume.set()
    await leaving.stop()
    assert (answer.status_code, answer.json()["hosts"][0]["error"]) == (200, "it has left")


async def test_what_is_shown_of_the_leases_is_bounded_and_adds_up(stack: Stack) -> None:
    await stack.add("kvtransfer", "kv-0")

    async def host(query: str = "") -> dict[str, Any]:
        hosts = (await stack.http.get(f"/fleet{query}")).json()["hosts"]
        return dict(hosts[0]) if hosts else {}

    async def sees_it() -> bool:
        return bool(await host())

    await eventually(sees_it)
    for query, shown in (("", 3), ("?leases=2", 2), ("?leases=1", 1)):
        told = await host(query)
        assert (len(told["leases"]), told["leases_left_out"]) == (shown, 3 - shown)
        owned = sum(lease["blocks"] - lease["shared_blocks"] for lease in told["leases"]) + told["blocks_left_out"]
        assert told["blocks_of_leases"] == owned == told["held"] + told["in_flight"]
        assert told["adds_up"] is True
    for wrong in ("0", "-1", "1000000", "many"):
        answer = await stack.http.get(f"/fleet?leases={wrong}")
        assert (answer.status_code, "leases" in answer.json()["error"]["message"]) == (400, True)


async def test_tokenize_and_detokenize(stack: Stack) -> None:
    answer = (await stack.post("/tokenize", model="toy", prompt="hé<|end|>", return_token_strs=True)).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [104, 195, 169, 256],
        "token_strs": ["h", "Ã", "©", "<|end|>"],
    }
    chat = (await stack.post("/tokenize", messages=[{"role": "user", "content": "h"}])).json()
    assert (chat["tokens"], chat["token_strs"]) == ([257, 104, 258], None)
    assert (await stack.post("/detokenize", tokens=[104, 195, 169, 256])).json() == {"prompt": "hé<|end|>"}
    assert (await stack.post("/detokenize", tokens=[300])).json()["error"]["param"] == "tokens"


async def test_tokenize_refuses_what_it_would_have_to_drop(stack: Stack) -> None:
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "h"}]}, "prompt"),
        ({"messages": [{"role": "user", "content": "h"}], "tools": [{}]}, "tools[0].function"),
        ({"messages": [{"role": "user", "content": "h"}], "add_special_tokens": "no"}, "add_special_tokens"),
    ):
        response = await stack.post("/tokenize", **body)  # type: ignore[arg-type]
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_keys_guard_the_api_and_not_the_probes(start_stack: StartStack) -> None:
    stack = await start_stack(api_key="first, second")
    for path in ("/v1/models", "/fleet", "/trace/x", "/v1/nothing"):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic first"},
            {"Authorization": "first"},
        ):
            response = await stack.http.get(path, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == ('Basic realm="Paceline"' if path == "/fleet" else "Bearer")
    for path in ("/tokenize", "/detokenize", "/v1/completions"):
        assert (await stack.post(path, prompt="x")).status_code == 401
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert (await stack.http.get(path)).status_code == 200
    for key in ("first", "second"):
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key) as client:
            assert (await client.models.list()).data[0].id == "toy"


async def test_keys_may_come_from_the_environment(start_stack: StartStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    stack = await start_stack()
    assert (await stack.http.get("/v1/models")).status_code == 401
    assert (await stack.http.get("/v1/models", headers={"Authorization": "Bearer secret"})).status_code == 200


async def test_large_bodies_are_refused_announced_or_not(start_stack: StartStack) -> None:
    stack = await start_stack(max_body_bytes=1000)

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100
        yield b'"}'

    headers = {"content-type": "application/json"}
    for content in (b"x" * 1001, parts()):
        response = await stack.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert "larger than 1000 bytes" in response.json()["error"]["message"]
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200


async def test_request_ids_are_taken_and_returned(stack: Stack) -> None:
    ids = [("mine-1", "mine-1"), ("mine-1", "mine-1")]
    for given, expected in ids:
        response = await stack.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": given}
        )
        assert (response.headers["x-request-id"], response.json()["id"]) == (expected, expected)
    keys = {call.work.key.request_id for call in stack.workers["decode-0"].calls}
    assert len(keys) == 2, "workers must not confuse requests to which a client gave the same id"
    assert all(key.startswith("mine-1-") for key in keys)
    body = await stack.post("/v1/completions", prompt="x", max_tokens=1, request_id="mine-2")
    assert (body.headers["x-request-id"], body.json()["id"]) == ("mine-2", "mine-2")


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "ünï"])
async def test_an_id_that_is_not_fit_is_replaced(stack: Stack, given: str) -> None:
    headers = httpx.Headers([(b"x-request-id", given.encode())])
    response = await stack.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert response.headers["x-request-id"].startswith("cmpl-")
    errors = await stack.http.get("/nothing")
    assert errors.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("stream", [False, True])
async def test_all_choices_of_a_request_are_one_trace(
    stack: Stack, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.core.telemetry._tracer", TracerProvider().get_tracer("test"))
    await stack.post("/v1/completions", prompt=["a", "b"], n=2, max_tokens=2, stream=stream)
    calls = [call for worker in stack.workers.values() for call in worker.calls]
    assert len(calls) == 8
    assert len({call.metadata["traceparent"].split("-")[1] for call in calls}) == 1


async def test_traces_reach_the_workers(stack: Stack) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    await stack.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers=headers)
    for worker in stack.workers.values():
        assert worker.calls[0].metadata["traceparent"].split("-")[1] == trace_id


async def test_one_line_is_logged_for_a_request(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="paceline"):
        await stack.post("/v1/completions", prompt="abc", max_tokens=5)
    (record,) = [record for record in caplog.records if hasattr(record, "outcome")]
    fields = vars(record)
    assert (fields["outcome"], fields["prompt_tokens"], fields["generated_tokens"]) == ("length", 3, 5)
    assert (fields["prefill_worker"], fields["decode_worker"], fields["attempts"]) == ("prefill-0", "decode-0", 1)


async def test_other_origins_are_not_let_in(stack: Stack) -> None:
    response = await stack.http.get("/ping", headers={"Origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_what_workers_count_is_metrics(stack: Stack) -> None:
    text = (await stack.http.get("/metrics")).text
    labels = 'model_name="toy",role="decode",worker="decode-0"'
    for line in (
        f"paceline:spec_decode_num_drafts_total{{{labels}}} 4.0",
        f"paceline:spec_decode_num_draft_tokens_total{{{labels}}} 9.0",
        f"paceline:spec_decode_num_accepted_tokens_total{{{labels}}} 5.0",
        'paceline:spec_decode_num_accepted_tokens_per_pos_total{model_name="toy",position="1",role="decode",'
        'worker="decode-0"} 2.0',
        'paceline:worker_step_seconds_total{kind="bubble",model_name="toy",role="decode",worker="decode-0"} 0.5',
        'paceline:kv_offload_bytes_total{direction="load",model_name="toy",role="decode",worker="decode-0"} 4096.0',
        'paceline:weight_bytes{format="int4",model_name="toy",role="decode",worker="decode-0"} 3000.0',
        'paceline:kv_swap_in_seconds_bucket{le="0.01",model_name="toy",role="decode",worker="decode-0"} 2.0',
        'paceline:kv_swap_in_seconds_count{model_name="toy",role="decode",worker="decode-0"} 3.0',
        'paceline:worker_request_step_seconds_total{kind="model",model_name="toy",phase="decode",role="decode",'
        'worker="decode-0"} 0.25',
    ):
        assert line in text


async def test_top_shows_the_fleet_of_a_gateway(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    await asyncio.to_thread(top, GatewayClient(stack.url), 0.1, 2)
    text = capsys.readouterr().out
    assert text.count("decode-0") == text.count("prefill-0") == 2
