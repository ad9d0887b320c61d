"""Adapters by name at a gateway: requests, the list of models, and names that come and go."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from paceline.core.adapters import Adapter, read_adapter, short_digest
from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.proto.fleet_pb2 import AdapterChange, AdapterReport
from paceline.services.gateway.api.resume import answer_digest
from paceline.services.gateway.fleet.adapter_book import REMOVAL_SECONDS, AdapterBook
from paceline.services.gateway.gateway import Gateway, load_models
from paceline.services.gateway.planning.schemas import CompletionRequest
from paceline.trace import render
from tests.adapters import write_files
from tests.services.gateway.api.batches.conftest import ended, line, submit
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_plans import toy_sequence


def write(folder: Path, alpha: int = 1) -> Path:
    """Write an adapter that no model fits. Gateways read only its content's digest."""
    write_files(folder, {"peft_type": "LORA", "lora_alpha": alpha}, {"x": torch.ones(1)})
    return folder


@pytest.fixture
async def adapted(start_stack: StartStack, tmp_path: Path) -> Stack:
    one, two = (write(tmp_path / name, alpha) for name, alpha in (("one", 1), ("two", 2)))
    store = str(tmp_path / "store.db")
    return await start_stack(enable_lora=True, lora_modules=f"sql={one},chat={two}", store=store)


async def complete(stack: Stack, model: str | None, **options: Any) -> httpx.Response:
    return await stack.post("/v1/completions", model=model, prompt="x", max_tokens=3, **options)


def newest(stack: Stack) -> Any:
    return stack.workers["decode-0"].calls[-1].work


async def base(stack: Stack) -> str:
    cards = (await stack.http.get("/v1/models")).json()["data"]
    return str(next(card["id"] for card in cards if card["parent"] is None))


async def test_a_request_names_an_adapter_as_its_model(adapted: Stack, tmp_path: Path) -> None:
    name = await base(adapted)
    assert (await complete(adapted, name)).json()["model"] == name
    plain = newest(adapted)
    assert not plain.HasField("adapter")
    answer = (await complete(adapted, "sql")).json()
    assert answer["model"] == "sql"
    work = newest(adapted)
    own = read_adapter("sql", str(tmp_path / "one"))
    assert (work.adapter.name, work.adapter.folder, work.adapter.digest) == ("sql", own.folder, own.digest)
    assert work.model != plain.model  # so that an older worker refuses it


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}},
}


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_takes_adapters(adapted: Stack, path: str) -> None:
    answer = await adapted.post(path, model="chat", **BODIES[path])
    assert answer.status_code == 200, answer.text
    assert newest(adapted).adapter.name == "chat"


async def test_lines_of_batches_name_adapters(adapted: Stack) -> None:
    batch = await submit(adapted, [line("1", model="sql"), line("2", model="none")])
    counts = (await ended(adapted, batch.id)).request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (1, 1)
    assert newest(adapted).adapter.name == "sql"


async def test_models_are_listed_with_their_adapters(adapted: Stack) -> None:
    name = await base(adapted)
    cards = (await adapted.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
        (name, None, name),
        ("sql", name, name),
        ("chat", name, name),
    ]
    assert (await adapted.http.get("/v1/models/sql")).json()["parent"] == name
    unknown = await complete(adapted, "other")
    assert unknown.status_code == 404
    assert "'sql'" in unknown.json()["error"]["message"]


def test_the_content_of_an_adapter_decides_what_is_cached_and_which_stream_goes_on() -> None:
    tokens = list(range(32))
    adapters = [None, *(Adapter("x", "/x", bytes([content])) for content in range(2)), Adapter("y", "/y", bytes([1]))]
    sequences = [toy_sequence(tokens, adapter=adapter) for adapter in adapters]
    plain, first, second, renamed = (sequence.context.links("layout")[0] for sequence in sequences)
    assert len({plain, first, second}) == 3
    assert renamed == second
    body = CompletionRequest(prompt="x")
    plain, first, second, renamed = (answer_digest(sequence.plan, body) for sequence in sequences)
    assert len({plain, first, second}) == 3
    assert renamed == second


async def test_names_come_and_go(adapted: Stack, tmp_path: Path) -> None:
    folder, load = str(write(tmp_path / "new", 3)), "/v1/load_lora_adapter"
    assert (await adapted.post(load, lora_name="new", lora_path=folder)).status_code == 200
    assert (await complete(adapted, "new")).status_code == 200
    before = newest(adapted).adapter.digest
    write(tmp_path / "new", 4)
    again = await adapted.post(load, lora_name="new", lora_path=folder)
    assert again.status_code == 400
    assert "load_inplace" in again.text
    await complete(adapted, "new")
    assert newest(adapted).adapter.digest == before
    assert (await adapted.post(load, lora_name="new", lora_path=folder, load_inplace=True)).status_code == 200
    await complete(adapted, "new")
    assert newest(adapted).adapter.digest != before
    assert (await adapted.post("/v1/unload_lora_adapter", lora_name="new")).status_code == 200
    assert (await complete(adapted, "new")).status_code == 404
    assert (await adapted.post("/v1/unload_lora_adapter", lora_name="new")).status_code == 404


async def test_folders_that_are_no_adapters_are_refused(adapted: Stack, tmp_path: Path) -> None:
    answer = await adapted.post("/v1/load_lora_adapter", lora_name="new", lora_path=str(tmp_path / "none"))
    assert answer.status_code == 400
    assert "an adapter is a folder as PEFT saves it" in answer.text
    taken = await adapted.post("/v1/load_lora_adapter", lora_name=await base(adapted), lora_path=str(tmp_path / "one"))
    assert taken.status_code == 400


async def test_adapters_get_no_name_before_a_worker_has_read_them(start_stack: StartStack, tmp_path: Path) -> None:
    alone = await start_stack(enable_lora=True, prefill=0, decode=0)
    load = {"lora_name": "new", "lora_path": str(write(tmp_path / "new"))}
    answer = await alone.post("/v1/load_lora_adapter", **load)
    assert answer.status_code == 503
    assert "whether the adapter 'new' fits" in answer.text
    assert (await alone.http.get("/v1/models/new")).status_code == 404
    await alone.add("decode", "d")
    await eventually(alone._is_healthy)
    assert (await alone.post("/v1/load_lora_adapter", **load)).status_code == 200
    assert (await alone.http.get("/v1/models/new")).status_code == 200


async def test_workers_fetch_adapters_of_the_hub(adapted: Stack) -> None:
    answer = await adapted.post("/v1/load_lora_adapter", lora_name="hub", lora_path="org/name")
    assert answer.status_code == 200
    await complete(adapted, "hub")
    assert newest(adapted).adapter.folder == "org/name@commit"


async def test_subfolders_of_a_folder_are_followed(start_stack: StartStack, tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    write(folder / "sql")
    write(folder / "toy")
    stack = await start_stack(enable_lora=True, lora_dir=str(folder))

    async def is_known(name: str) -> bool:
        return (await stack.http.get(f"/v1/models/{name}")).status_code == 200

    await eventually(lambda: is_known("sql"))
    await complete(stack, "sql")
    before = newest(stack).adapter.digest
    assert before == read_adapter("sql", str(folder / "sql")).digest
    write(folder / "chat")
    tensors = (folder / "chat/adapter_model.safetensors").read_bytes()
    (folder / "chat/adapter_model.safetensors").write_bytes(tensors[:-1])  # half written
    write(folder / "sql", 2)

    async def has_changed() -> bool:
        await complete(stack, "sql")
        return bool(newest(stack).adapter.digest != before)

    await eventually(has_changed)
    assert not await is_known("chat")
    (folder / "chat/adapter_model.safetensors").write_bytes(tensors)
    await eventually(lambda: is_known("chat"))
    assert (await stack.http.get("/v1/models/toy")).json()["parent"] is None  # the model's name is not for subfolders
    shutil.rmtree(folder / "sql")

    async def is_gone() -> bool:
        return not await is_known("sql")

    await eventually(is_gone)
    assert await is_known("chat")


async def test_removals_of_names_are_forgotten_everywhere() -> None:
    old = AdapterChange(name="old", changed=time.time_ns() - 2 * REMOVAL_SECONDS * 10**9)
    new = AdapterChange(name="new", changed=time.time_ns())
    book = AdapterBook({})
    book.merge([old, new])
    assert book.changes == [new]


@pytest.mark.parametrize("name", ["a,b", "a\nb", " a", "\x1b[31m", "\ud800"])
async def test_names_that_cannot_be_shown_are_refused(adapted: Stack, tmp_path: Path, name: str) -> None:
    write(tmp_path / "a")
    body = json.dumps({"lora_name": name, "lora_path": str(tmp_path / "a")})
    answer = await adapted.http.post(
        "/v1/load_lora_adapter", content=body, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, "lora_name" in answer.text) == (400, True)


def test_a_folder_of_adapters_must_be_there(toy_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-lora"):
        GatewayConfig(lora_dir="/x")
    config = GatewayConfig(model=str(toy_model), store="none", enable_lora=True, lora_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is not a folder"):
        Gateway(config, load_models(config))


async def test_a_server_without_adapters_says_so(stack: Stack, tmp_path: Path) -> None:
    answer = await stack.post("/v1/load_lora_adapter", lora_name="x", lora_path=str(write(tmp_path / "x")))
    assert answer.status_code == 400
    assert "--enable-lora" in answer.text


async def test_two_names_that_are_the_same_are_refused(toy_model: Path, tmp_path: Path) -> None:
    modules = f"toy={write(tmp_path / 'x')}"
    named = {"model": str(toy_model), "served_model_name": "toy", "store": "none"}
    config = GatewayConfig(**named, enable_lora=True, lora_modules=modules)
    with pytest.raises(ConfigError, match="name of another model"):
        Gateway(config, load_models(config))


async def test_requests_go_to_workers_that_have_the_adapter(adapted: Stack, tmp_path: Path) -> None:
    own = read_adapter("sql", str(tmp_path / "one"))
    having = await adapted.add("decode", "decode-1")
    having.lora = AdapterReport(digests=[short_digest(own.digest)], miss_seconds=1.0, slots=4)
    await eventually(partial(is_in_memory, adapted, ["decode-1"]))
    for _ in range(3):
        assert (await complete(adapted, "sql")).status_code == 200
    assert [call.work.adapter.name for call in having.calls] == 3 * ["sql"]


async def is_in_memory(stack: Stack, workers: list[str]) -> bool:
    told = (await stack.http.get("/fleet")).json()["adapters"]
    return any(each["workers"] == workers for each in told)


async def test_the_use_of_adapters_is_told(start_stack: StartStack, tmp_path: Path) -> None:
    modules = ",".join(f"{name}={write(tmp_path / name, alpha)}" for alpha, name in enumerate(("sql", "chat"), 1))
    stack = await start_stack(enable_lora=True, lora_modules=modules, vllm_metric_names=True)
    worker = stack.workers["decode-0"]
    worker.lora = AdapterReport(slots=4)
    worker.pause_after = 1
    running = asyncio.create_task(complete(stack, "sql"))

    async def is_running() -> bool:
        text = (await stack.http.get("/metrics")).text
        labels = '{max_lora="4",running_lora_adapters="sql",waiting_lora_adapters=""}'
        found = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info")]
        return len(found) == 1 and labels in found[0] and float(found[0].split()[-1]) > 1e9

    await eventually(is_running)
    (name,) = {each["model_name"] for each in (await stack.http.get("/fleet")).json()["adapters"]}
    assert name == await base(stack)
    told = [(each["name"], each["running"]) for each in (await stack.http.get("/fleet")).json()["adapters"]]
    assert told == [("sql", 1), ("chat", 0)]
    async with stack.http.stream("GET", "/console/feed") as feed:
        events = (json.loads(line[6:]) async for line in feed.aiter_lines() if line.startswith("data: "))
        live = await anext(data async for data in events if "adapters" in data)
    assert [(each["name"], each["running"]) for each in live["adapters"]] == told
    worker.resume.set()
    answer = await running
    trace = (await stack.http.get(f"/trace/{answer.json()['id']}")).json()
    digest = read_adapter("sql", str(tmp_path / "sql")).digest.hex()
    assert trace["asked"]["adapter"] == {"name": "sql", "digest": digest}
    assert f"adapter sql ({digest[:16]})" in "\n".join(render(trace))
