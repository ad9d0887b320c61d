"""What a client of an overloaded gateway sees, and what its operator does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.services.gateway.conftest import Stack, StartStack, eventually

pytestmark = pytest.mark.slow

HEADERS = {"x-api-key": "k"}


async def counts(stack: Stack, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric that are not 0, by the labels."""
    text = (await stack.http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = [sample for sample in samples if sample.name == name and sample.value]
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in found}


async def test_requests_that_would_be_late_are_refused_with_a_reason(start_stack: StartStack, tmp_path: Path) -> None:
    keys, classes = tmp_path / "keys.toml", tmp_path / "classes.toml"
    keys.touch(0o600)
    keys.write_text('[chat]\nkey = "k"\nclass = "chat"\n[small]\nkey = "s"\nmax_concurrent = 1\n')
    classes.write_text("[chat]\nttft_seconds = 0.3\n")
    stack = await start_stack(api_keys_file=str(keys), classes_file=str(classes), vllm_metric_names=True)
    stack.workers["decode-0"].max_seqs = 0
    body = {"prompt": "abc", "max_tokens": 2}

    async def refused(**headers: str) -> str:
        answer = await stack.http.post("/v1/completions", json=body, headers=HEADERS | headers)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        return str(answer.json()["error"]["message"])

    assert "later than the objective" in await refused()
    assert "the deadline of this request" in await refused(**{"X-Request-Timeout": "0.1"})
    assert "objective" in await refused(**{"X-SLO-TTFT-MS": "50"})
    waiting = asyncio.create_task(stack.http.post("/v1/completions", json=body, headers={"x-api-key": "s"}))

    async def waits() -> bool:
        name = "paceline:num_requests_waiting_by_class"
        return await counts(stack, name, "request_class") == {("default",): 1.0}

    await eventually(waits)
    limited = await stack.http.post("/v1/completions", json=body, headers={"x-api-key": "s"})
    assert limited.status_code == 429
    waiting.cancel()
    expected = {("chat", "overload"): 2.0, ("chat", "deadline"): 1.0, ("default", "limit"): 1.0}
    assert await counts(stack, "paceline:requests_refused_total", "request_class", "reason") == expected
    rejections = await counts(stack, "vllm:admission_rejections_total", "reason")
    assert rejections == {("overload",): 2.0, ("deadline",): 1.0, ("limit",): 1.0}


@pytest.mark.parametrize("name", ["X-Request-Timeout", "X-SLO-TTFT-MS"])
async def test_a_deadline_that_is_no_number_is_refused(stack: Stack, name: str) -> None:
    for value in ("soon", "0", "-1", "1e9"):
        answer = await stack.http.post("/v1/completions", json={"prompt": "abc"}, headers={name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_a_request_that_runs_ends_at_its_deadline(stack: Stack) -> None:
    stack.pause_decode()
    answer = await stack.http.post("/v1/completions", json={"prompt": "abc"}, headers={"X-Request-Timeout": "0.5"})
    assert answer.status_code == 503
    assert "took longer than 0.5 seconds" in answer.json()["error"]["message"]


async def test_workers_are_told_the_objective_of_a_request(start_stack: StartStack, tmp_path: Path) -> None:
    classes = tmp_path / "classes.toml"
    classes.write_text("[default]\nttft_seconds = 30.0\n")
    stack = await start_stack(classes_file=str(classes))
    body = {"prompt": "abc", "max_tokens": 2}
    for headers, least, most in (({}, 20.0, 30.0), ({"X-SLO-TTFT-MS": "8000"}, 1.0, 8.0)):
        answer = await stack.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        for worker in stack.workers.values():
            assert least < worker.calls[-1].work.ttft_seconds <= most
