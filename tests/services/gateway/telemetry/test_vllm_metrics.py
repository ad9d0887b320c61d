"""vLLM's names of metrics: all that its dashboards and the recipes of autoscalers query."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from paceline.core.block_counts import Counts
from tests.services.gateway.conftest import Stack, StartStack, eventually

pytestmark = pytest.mark.slow

HISTOGRAMS = {
    "e2e_request_latency_seconds": "0.3",
    "inter_token_latency_seconds": "0.025",
    "iteration_tokens_total": "8.0",
    "request_decode_time_seconds": "0.3",
    "request_generation_tokens": "5.0",
    "request_inference_time_seconds": "0.3",
    "request_max_num_generation_tokens": "5.0",
    "request_num_preemptions": "1.0",
    "request_params_max_tokens": "5.0",
    "request_params_n": "1.0",
    "request_prefill_time_seconds": "0.3",
    "request_prompt_tokens": "5.0",
    "request_queue_time_seconds": "0.3",
    "request_time_per_output_token_seconds": "0.025",
    "time_to_first_token_seconds": "7.5",
}
"""Names without a prefix, and one of vLLM's buckets for each."""

SCALARS = (
    "generation_tokens_total",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_total",
    "request_success_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_drafts_total",
)

COUNTED = ("request_success_total", "request_num_preemptions_count", "prompt_tokens_total", "generation_tokens_total")


async def samples(stack: Stack) -> dict[str, list[Sample]]:
    text = (await stack.http.get("/metrics")).text
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


async def test_dashboards_find_every_metric_with_its_labels(start_stack: StartStack) -> None:
    stack = await start_stack(vllm_metric_names=True)
    await stack.add("kvtransfer", "kv-0")
    await stack.post("/v1/completions", prompt="abcd", max_tokens=5, seed=0)
    await stack.post("/v1/completions", prompt=7, max_tokens="many")

    async def sees_the_host() -> bool:
        return "vllm:kv_cache_usage_perc" in await samples(stack)

    await eventually(sees_the_host)
    seen = await samples(stack)
    engine = {"model_name": "toy", "engine": "0"}
    for name in SCALARS:
        for sample in seen[f"vllm:{name}"]:
            assert sample.labels.items() >= engine.items(), name
    for name, bound in HISTOGRAMS.items():
        assert [one.labels for one in seen[f"vllm:{name}_count"]] == [engine], name
        assert len(seen[f"vllm:{name}_sum"]) == 1
        assert bound in {one.labels["le"] for one in seen[f"vllm:{name}_bucket"]}, name
        assert {*seen[f"vllm:{name}_bucket"][0].labels} == {*engine, "le"}
    assert seen["vllm:prompt_tokens_total"][0].value == 4
    assert seen["vllm:num_preemptions_total"][0].value == 4  # of two workers
    assert seen["vllm:request_num_preemptions_sum"][0].value == 2  # as its decode worker said
    reasons = {one.labels["finished_reason"]: one.value for one in seen["vllm:request_success_total"]}
    assert reasons.items() >= {"length": 1, "stop": 0, "abort": 0, "error": 0}.items()
    assert {one.labels["reason"] for one in seen["vllm:num_requests_waiting_by_reason"]} == {
        "capacity",
        "deferred",
        "no_worker",
    }
    assert {one.labels["position"] for one in seen["vllm:spec_decode_num_accepted_tokens_per_pos_total"]} == {"0", "1"}


async def test_who_has_the_end_of_an_answer_finds_all_its_tokens_counted(start_stack: StartStack) -> None:
    stack = await start_stack(vllm_metric_names=True)
    sequences = prompt_tokens = generated = 0
    for more in ({}, {"stream": True}, {"n": 2}, {"stop": "q"}, {"stop": "q", "stream": True}):
        shown = {"stream_options": {"include_usage": True}} if "stream" in more else {}
        answer = await stack.post("/v1/completions", prompt="abcd", max_tokens=9, seed=0, **more, **shown)
        seen = await samples(stack)  # at once
        last = answer.text.split("data: ")[-2] if shown else answer.text
        usage = json.loads(last)["usage"]
        own = more.get("n", 1)
        sequences, prompt_tokens = sequences + own, prompt_tokens + own * usage["prompt_tokens"]
        generated += usage["completion_tokens"]
        found = {name: sum(one.value for one in seen[f"vllm:{name}"]) for name in COUNTED}
        assert found == dict(zip(COUNTED, (sequences, sequences, prompt_tokens, generated))), more
        gaps = seen["vllm:inter_token_latency_seconds_count"][0].value
        assert gaps == generated - sequences, more


async def test_information_and_http_responses(start_stack: StartStack) -> None:
    stack = await start_stack(vllm_metric_names=True)
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=-1)).status_code == 400
    assert (await stack.http.get("/made/up")).status_code == 404
    seen = await samples(stack)
    (cache,) = seen["vllm:cache_config_info"]
    assert (cache.value, cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == (1, "16", "8")
    (loras,) = seen["vllm:lora_requests_info"]
    assert (loras.labels["max_lora"], loras.labels["running_lora_adapters"]) == ("0", "")
    counted = {(one.labels["handler"], one.labels["status"]): one.value for one in seen["http_requests_total"]}
    assert counted["/v1/completions", "4xx"] == 1
    assert counted["none", "4xx"] == 1
    own = {(one.labels["handler"], one.labels["status"]) for one in seen["paceline:http_responses_total"]}
    assert {("/v1/completions", "400"), ("none", "404")} <= own


async def test_without_the_option_there_are_none(stack: Stack) -> None:
    assert "vllm:" not in (await stack.http.get("/metrics")).text


async def test_the_use_of_a_host_s_memory_is_that_of_now(stack: Stack) -> None:
    host = await stack.add("kvtransfer", "kv-0")
    host.samples = list(Counts(total=10, free=10, held=0, in_flight=0, cached=0).samples())

    async def is_live() -> bool:
        usage = (await samples(stack))["paceline:kv_cache_usage_perc"]
        return {one.labels["worker"]: one.value for one in usage}.get("kv-0") == 0.5  # as its ledger says

    await eventually(is_live)
