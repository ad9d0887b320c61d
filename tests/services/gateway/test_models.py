"""Several models behind one gateway, each with a fleet of its own. Workers of two fleets may have the same names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.model_folder import model_digest
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Role, connect, read_members
from tests.services.gateway.api.batches.conftest import content, ended, line, submit
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_model import write_toy_model
from tests.services.gateway.toy_workers import ToyWorker

ONE, TWO = "org/one", "two"
TEXTS = {ONE: "1" * 64, TWO: "2" * 64}


class Models:
    """A gateway of two models, and toy workers of both."""

    def __init__(self, stack: Stack, folders: dict[str, Path], clusters: dict[str, str]) -> None:
        self.stack = stack
        self.http = stack.http
        self.workers: list[ToyWorker] = []
        self._folders = folders
        self.clusters = clusters

    async def add(self, model: str, role: Role = "decode", **options: Any) -> ToyWorker:
        digest = model_digest(self._folders[model])
        worker = ToyWorker(role, f"{role}-0", text=TEXTS[model], model=digest, **options)
        self.workers.append(worker)
        return await worker.start(self.stack.redis_url, self.clusters[model])

    async def complete(self, model: str, **options: Any) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 5, **options}
        return await self.stack.post("/v1/completions", model=model, **body)

    async def text(self, model: str) -> str:
        answer = (await self.complete(model)).json()
        assert answer["model"] == model
        return str(answer["choices"][0]["text"])

    async def is_served(self, model: str) -> bool:
        return (await self.http.get("/health", params={"model": model})).status_code == 200

    async def is_gone(self, model: str) -> bool:
        return not await self.is_served(model)


@pytest.fixture
async def empty(start_stack: StartStack, toy_model: Path, tmp_path: Path) -> AsyncIterator[Models]:
    """A gateway of two models that have no workers yet."""
    folders = {ONE: toy_model, TWO: write_toy_model(tmp_path / "other", chat_template=None)}
    own, file = f"second-{uuid.uuid4().hex}", tmp_path / "models.toml"
    file.write_text(
        f'["{ONE}"]\nmodel = "{folders[ONE]}"\n[{TWO}]\nmodel = "{folders[TWO]}"\ncluster = "{own}"\nmax-logprobs = 3\n'
    )
    store = str(tmp_path / "store.db")
    stack = await start_stack(prefill=0, decode=0, model="", models_file=str(file), store=store, vllm_metric_names=True)
    models = Models(stack, folders, {ONE: f"{stack.cluster}-{ONE}", TWO: own})
    yield models
    for worker in models.workers:
        worker.resume.set()
        await worker.stop()


@pytest.fixture
async def models(empty: Models) -> Models:
    """A gateway of two models with a decode worker for each."""
    for name in (ONE, TWO):
        await empty.add(name)
        await eventually(lambda name=name: empty.is_served(name))  # type: ignore[misc]
    return empty


async def test_a_request_runs_on_the_fleet_of_its_model(models: Models) -> None:
    assert (await models.text(ONE), await models.text(TWO)) == ("11111", "22222")
    streamed = models.stack.openai.completions.create(model=TWO, prompt="x", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in await streamed]) == "222"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_conversation_has_the_template_of_its_model(models: Models, path: str, body: dict[str, Any]) -> None:
    assert (await models.http.post(path, json={"model": ONE, **body})).status_code == 200
    refused = await models.http.post(path, json={"model": TWO, **body})
    assert refused.status_code == 400
    assert "chat template" in refused.text


async def test_tokens_go_to_the_model_that_they_name(models: Models) -> None:
    body = {"token_ids": [97], "sampling_params": {"max_tokens": 2}}
    for name in (ONE, TWO):
        answer = (await models.stack.post("/inference/v1/generate", model=name, **body)).json()
        assert answer["choices"][0]["token_ids"] == [ord(TEXTS[name][0])] * 2
        assert (await models.stack.post("/detokenize", model=name, tokens=[97])).json() == {"prompt": "a"}


async def test_a_model_has_options_of_its_own(models: Models) -> None:
    assert (await models.complete(ONE, logprobs=5)).status_code == 200
    assert (await models.complete(TWO, logprobs=5)).status_code == 400


async def test_all_models_are_listed_once_they_have_loaded(empty: Models) -> None:
    async def listed() -> dict[str, int]:
        cards = (await empty.http.get("/v1/models")).json()["data"]
        return {card["id"]: card["max_model_len"] for card in cards}

    assert await listed() == {}
    await empty.add(TWO, max_model_len=128)
    await eventually(lambda: empty.is_served(TWO))
    assert await listed() == {TWO: 128}
    assert (await empty.http.get(f"/v1/models/{ONE}")).status_code == 503
    await empty.add(ONE)
    await eventually(lambda: empty.is_served(ONE))
    assert await listed() == {ONE: 512, TWO: 128}
    assert (await empty.http.get(f"/v1/models/{ONE}")).json()["max_model_len"] == 512


async def test_a_request_for_no_model_is_told_which_there_are(models: Models) -> None:
    unknown, unnamed = await models.complete("three"), await models.stack.post("/v1/completions", prompt="x")
    assert (unknown.status_code, unnamed.status_code) == (404, 400)
    for answer in (unknown, unnamed):
        error = answer.json()["error"]
        assert error["param"] == "model"
        assert "'org/one', 'two'" in error["message"]
    assert (await models.http.get("/health", params={"model": "three"})).status_code == 404


async def test_a_fleet_without_workers_leaves_the_others_alone(models: Models) -> None:
    lost = models.workers.pop()
    await lost.stop()
    await eventually(lambda: models.is_gone(TWO))
    assert (await models.http.get("/health")).status_code == 200
    waiting = asyncio.create_task(models.complete(TWO))
    assert await models.text(ONE) == "11111"
    assert not waiting.done()
    await models.add(TWO)
    assert (await waiting).status_code == 200


async def test_a_full_fleet_leaves_the_others_alone(models: Models) -> None:
    models.workers[1].pause_after = 0
    models.workers[1].max_seqs = 1
    tasks = [asyncio.create_task(models.text(TWO)) for _ in range(2)]
    await eventually(models.stack.has_load(2))
    assert await models.text(ONE) == "11111"
    models.workers[1].resume.set()
    assert {await task for task in tasks} == {"22222"}


async def test_lines_of_a_model_without_workers_hold_up_no_others(empty: Models) -> None:
    await empty.add(TWO)
    stack, lines = empty.stack, [line(f"{name} {number}", model=name) for name in (ONE, TWO) for number in range(3)]
    batch = await submit(stack, lines)

    async def others_are_answered() -> bool:
        counts = (await stack.openai.batches.retrieve(batch.id)).request_counts
        return counts is not None and counts.completed == 3

    await eventually(others_are_answered)
    await empty.add(ONE)
    answers = await content(stack, (await ended(stack, batch.id)).output_file_id)
    assert len(answers) == len(lines)


async def test_a_batch_has_lines_for_all_models(models: Models) -> None:
    lines = [line(f"{name} {number}", model=name) for number in range(3) for name in (ONE, TWO, "three")]
    batch = await ended(models.stack, (await submit(models.stack, lines)).id)
    answers = await content(models.stack, batch.output_file_id)
    texts = {name: each["response"]["body"]["choices"][0]["text"] for name, each in answers.items()}
    assert texts == {f"{name} {number}": TEXTS[name][:4] for number in range(3) for name in (ONE, TWO)}
    refused = await content(models.stack, batch.error_file_id)
    assert {each["response"]["status_code"] for each in refused.values()} == {404}
    assert len(refused) == 3


async def test_metrics_name_the_model(models: Models) -> None:
    await models.text(ONE)
    for _ in range(2):
        await models.text(TWO)
    text = (await models.http.get("/metrics")).text
    seen = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    keys = [(sample.name, *sorted(sample.labels.items())) for sample in seen]
    assert len(set(keys)) == len(keys)
    for prefix, label in (("paceline", {}), ("vllm", {"engine": "1"})):
        ended = {
            sample.labels["model_name"]: sample.value
            for sample in seen
            if sample.name == f"{prefix}:request_success_total" and sample.labels["finished_reason"] == "length"
        }
        assert ended == {ONE: 1, TWO: 2}
        assert any(label.items() <= sample.labels.items() for sample in seen if sample.name.startswith(prefix))
    up = {sample.labels["model_name"] for sample in seen if sample.name == "paceline:worker_up"}
    assert up == {ONE, TWO}


async def test_operators_see_all_fleets_or_one(models: Models) -> None:
    async def workers(**params: str) -> list[tuple[str, str]]:
        fleet = (await models.http.get("/fleet", params=params)).json()
        return [(each["model_name"], each["worker_id"]) for each in fleet["workers"] if each["role"] == "decode"]

    assert await workers() == [(ONE, "decode-0"), (TWO, "decode-0")]
    assert await workers(model=TWO) == [(TWO, "decode-0")]
    for path in ("/fleet/scale", "/fleet/steps", "/server_info"):
        assert (await models.http.get(path)).status_code == 400
        assert (await models.http.get(path, params={"model": TWO})).status_code == 200
    assert (await models.http.get("/server_info", params={"model": TWO})).json()["model"] == TWO


async def test_roles_are_changed_in_the_fleet_that_is_named(models: Models) -> None:
    refused = await models.stack.post("/fleet/scale", flip={"prefill-0": "standby"})
    assert "say which one" in refused.json()["error"]["message"]
    unknown = await models.stack.post("/fleet/scale", model=ONE, flip={"prefill-0": "standby"})
    assert "no ready worker" in unknown.json()["error"]["message"]


async def test_traces_name_the_model(models: Models) -> None:
    await models.http.post(
        "/v1/completions", json={"model": TWO, "prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "asked"}
    )
    assert (await models.http.get("/trace/asked")).json()["model"] == TWO
    assert (await models.http.get("/console/requests")).json()["requests"][0]["model"] == TWO


async def test_the_console_shows_the_model_that_is_chosen(models: Models) -> None:
    for params, shown in (({}, ONE), ({"model": TWO}, TWO)):
        async with models.http.stream("GET", "/console/feed", params=params) as answer:
            data = await anext(text async for text in answer.aiter_lines() if text.startswith("data: "))
            first = json.loads(data.removeprefix("data: "))
        assert (first["model"], first["models"]) == (shown, [ONE, TWO])


async def test_gateways_meet_in_the_fleets_of_all_models(models: Models) -> None:
    await models.stack.another_gateway()
    async with contextlib.aclosing(connect(models.stack.redis_url)) as redis:
        found = [await read_members(redis, models.clusters[name], UNSIGNED) for name in (ONE, TWO)]
    names = [{each.worker_id for each in members if each.role == "gateway"} for members in found]
    assert names[0] == names[1]
    assert len(names[0]) == 2


async def test_a_stream_goes_on_at_another_gateway(models: Models) -> None:
    other = await models.stack.another_gateway()
    body = {"model": TWO, "prompt": "x", "max_tokens": 6, "stream": True}
    begun = await models.http.post("/v1/completions", json=body, headers={"X-Event-IDs": "true"})
    fourth = begun.text.split("\n\n")[3].removeprefix("id: ").partition("\n")[0]
    answer = await other.http.post("/v1/completions", json=body, headers={"Last-Event-ID": fourth})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == "22"
