"""Prefill and decode workers that serve adapters, with real servers and a real arena."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import transformers

from paceline.core.adapters import Adapter, read_adapter, short_digest
from paceline.core.config import WorkerConfig
from paceline.core.errors import BusyError, InvalidRequestError, PacelineError
from paceline.proto import common_pb2
from paceline.services.common.wire import adapter_to_pb, work_model
from paceline.services.text_worker import add_services
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.worker_process import WorkerProcess
from tests.adapters import merged, write_adapter
from tests.services.worker.conftest import Host, StartHost, prompts
from tests.tiny_checkpoints import write_tiny

OPTIONS: dict[str, Any] = {"max_batched_tokens": 48, "enable_lora": True}
TOKENS = 12


@pytest.fixture
def reference(tmp_path: Path) -> transformers.PreTrainedModel:
    return write_tiny(tmp_path / "model", "llama")


def adapter(tmp_path: Path, model: transformers.PreTrainedModel, seed: int, **settings: Any) -> Adapter:
    folder = write_adapter(tmp_path / f"adapter {seed}", model, seed=seed, size=3.0, **settings)
    return read_adapter(f"adapter {seed}", str(folder))


async def test_a_mix_of_adapters_gives_the_tokens_of_merged_models(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    adapters = [adapter(tmp_path, reference, seed) for seed in range(3)]
    cases = [(prompt, own) for prompt in prompts(3) for own in (None, *adapters)]
    wanted: dict[Adapter | None, list[list[int]]] = {}
    for own in (None, *adapters):
        folder = tmp_path / "model"
        if own is not None:
            folder = tmp_path / f"merged {own.name}"
            merged(reference, Path(own.folder)).save_pretrained(folder)
        async with start_host(folder, max_batched_tokens=48) as host:
            wanted[own] = [(await host.generate(prompt, TOKENS, aggregated=True)).tokens for prompt in prompts(3)]
    expected = [wanted[own][index] for index in range(3) for own in (None, *adapters)]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    # Fewer slots than adapters, so that steps leave requests out.
    async with start_host(tmp_path / "model", **OPTIONS, max_loras=2, max_cpu_loras=3) as host:
        for _ in range(2):
            outcomes = await asyncio.gather(*(host.generate(prompt, TOKENS, adapter=own) for prompt, own in cases))
            assert [outcome.tokens for outcome in outcomes] == expected
        assert sum(outcome.cached_tokens for outcome in outcomes) > 0
        assert await host.all_blocks_back()


async def cached(host: Host, prompt: list[int], own: Adapter | None) -> int:
    return (await host.generate(prompt, 2, adapter=own)).cached_tokens


async def test_cached_blocks_belong_to_an_adapters_content(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    first, second = (adapter(tmp_path, reference, seed) for seed in range(2))
    (prompt,) = prompts(1, 64, 64)
    async with start_host(tmp_path / "model", **OPTIONS) as host:
        assert await cached(host, prompt, first) == 0
        assert await cached(host, prompt, second) == 0
        assert await cached(host, prompt, None) == 0
        renamed = Adapter("another name", first.folder, first.digest)
        assert await cached(host, prompt, renamed) >= 48
        # Other content under the same name, in the same folder.
        replaced = adapter(tmp_path, reference, 0, lora_alpha=2)
        assert await cached(host, prompt, replaced) == 0


async def test_blocks_belong_to_the_way_in_which_workers_apply_adapters(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    fingerprints = []
    ways: list[dict[str, Any]] = [
        {},
        {"max_lora_rank": 8},
        {"lora_target_modules": "o_proj"},
        {"lora_dtype": "bfloat16"},
    ]
    for way in ways:
        async with start_host(tmp_path / "model", **OPTIONS, dtype="float32", **way) as host:
            fingerprints.append(host.decode.worker.layout.fingerprint)
    async with start_host(tmp_path / "model", max_batched_tokens=48, dtype="float32") as host:
        assert host.decode.worker.layout.fingerprint == fingerprints[0]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


async def refusal(host: Host, own: Adapter) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await host.generate([5, 6, 7], 2, adapter=own)
    return f"{caught.value.code().name}: {caught.value.details()}"


async def test_adapters_that_cannot_be_served_are_refused(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    good = adapter(tmp_path, reference, 0)
    large = adapter(tmp_path, reference, 1, rank=9)
    async with start_host(tmp_path / "model", **OPTIONS, max_lora_rank=8) as host:
        assert "INVALID_ARGUMENT" in (told := await refusal(host, large))
        assert "--max-lora-rank" in told
        changed = Adapter("x", good.folder, bytes(32))
        assert "has changed since it was named" in await refusal(host, changed)
        lost = await refusal(host, Adapter("x", str(tmp_path / "none"), bytes(32)))
        assert ("cannot be read" in lost, "UNAVAILABLE" in lost) == (True, True)  # other machines may have it
        assert "32 bytes" in await refusal(host, Adapter("x", good.folder, b"short"))
        assert len((await host.generate([5, 6, 7], 2, adapter=good)).tokens) == 2
    async with start_host(tmp_path / "model", max_batched_tokens=48) as host:
        assert "--enable-lora" in await refusal(host, good)


async def test_an_adapter_is_checked_before_it_gets_a_name(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    good = adapter(tmp_path, reference, 0)
    other = write_tiny(tmp_path / "other model", "llama", hidden_size=96)
    misfits = {
        "--max-lora-rank": adapter(tmp_path, reference, 1, rank=9).folder,
        "lora_A and lora_B are": adapter(tmp_path, other, 2).folder,
        "a folder as PEFT saves it": str(tmp_path / "none"),
    }
    async with start_host(tmp_path / "model", **OPTIONS, max_lora_rank=8) as host:
        for worker in (host.prefill.worker, host.decode.worker):
            assert await worker.adapters.examine(good.name, good.folder) == adapter_to_pb(good)
            for reason, folder in misfits.items():
                with pytest.raises(InvalidRequestError, match=reason):
                    await worker.adapters.examine("x", folder)
    async with start_host(tmp_path / "model", max_batched_tokens=48) as host:
        with pytest.raises(PacelineError, match="--enable-lora"):
            await host.decode.worker.adapters.examine(good.name, good.folder)


async def test_an_adapter_of_the_hub_has_the_commit_that_was_checked(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub/models--org--sql"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    own = adapter(tmp_path, reference, 0)
    shutil.copytree(own.folder, repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    async with start_host(tmp_path / "model", **OPTIONS) as host:
        found = await host.decode.worker.adapters.examine("sql", "org/sql")
        assert (found.folder, found.digest) == (f"org/sql@{commit}", own.digest)
        named = Adapter("sql", found.folder, found.digest)
        assert len((await host.generate([5, 6, 7], 2, adapter=named)).tokens) == 2
        with pytest.raises(InvalidRequestError, match="HF_HUB_OFFLINE"):
            await host.decode.worker.adapters.examine("sql", "org/other")


async def test_adapters_that_running_requests_need_stay_in_memory(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    adapters = [adapter(tmp_path, reference, seed) for seed in range(3)]
    works = [common_pb2.Work(adapter=adapter_to_pb(own)) for own in adapters]
    async with start_host(tmp_path / "model", **OPTIONS, max_loras=1, max_cpu_loras=2) as host:
        store = host.decode.worker.adapters
        async with store.holding(works[0]):
            async with store.holding(works[1]):
                with pytest.raises(PacelineError, match="all 2 adapters"):
                    async with store.holding(works[2]):
                        pass
            async with store.holding(works[2]):  # in place of the second one
                first = store.adapter_of(works[0])
                assert first is not None
                assert first.digest == adapters[0].digest
        figures = {sample.figure: sample.value for sample in store.samples()}
        assert figures.pop("lora_load_seconds") > 0
        assert figures == {"lora_adapters": 2, "lora_loads": 3, "lora_evictions": 1}
        report = store.report()
        assert list(report.digests) == sorted(short_digest(adapters[index].digest) for index in (0, 2))
        assert report.slots == 1
        assert report.miss_seconds > 0


async def test_adapters_that_cannot_be_read_in_time_are_left_to_other_workers(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    adapters = [adapter(tmp_path, reference, seed) for seed in range(3)]
    first, second, third = (common_pb2.Work(adapter=adapter_to_pb(own)) for own in adapters)
    async with start_host(tmp_path / "model", **OPTIONS, max_loras=1, max_cpu_loras=2) as host:
        store = host.decode.worker.adapters
        # Nothing else is read, so the reading begins, although it takes longer than the request.
        with pytest.raises(BusyError, match="still reads"):
            async with store.holding(first, seconds=0.0):
                pass
        async with store.holding(first):
            needed = store.report().miss_seconds
        assert needed > 0
        with pytest.raises(BusyError, match="still reads"):
            async with store.holding(second, seconds=0.0):
                pass
        with pytest.raises(BusyError, match="and the request ends in"):
            async with store.holding(third, seconds=needed / 2):
                pass
        async with store.holding(first, seconds=needed / 2):
            # Until it has been read, an adapter makes no room for others: its request comes again.
            with pytest.raises(BusyError, match="all 2 adapters"):
                async with store.holding(third):
                    pass
        async with store.holding(second):
            assert {each.figure: each.value for each in store.samples()}["lora_loads"] == 2


async def test_requests_wait_together_for_one_reading(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    own = adapter(tmp_path, reference, 0)
    async with start_host(tmp_path / "model", **OPTIONS) as host:
        await asyncio.gather(*(host.generate([5, 6, index], 2, adapter=own) for index in range(4)))
        for worker in (host.prefill.worker, host.decode.worker):
            assert {each.figure: each.value for each in worker.adapters.samples()}["lora_loads"] == 1


async def test_named_adapters_are_checked_at_the_start(
    start_host: StartHost, tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    own = adapter(tmp_path, reference, 0)
    config = json.loads((Path(own.folder) / "adapter_config.json").read_text())
    (Path(own.folder) / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    async with start_host(tmp_path / "model", **OPTIONS) as host:
        changes = {"worker_id": "other", "lora_modules": f"x={own.folder}"}
        wrong: WorkerConfig = host.decode._config.model_copy(update=changes)
        with pytest.raises(PacelineError, match="use_dora"):
            await WorkerProcess.start(wrong, "decode", make_worker, add_services)


def test_releases_that_know_no_adapters_refuse_work_with_one() -> None:
    assert work_model("digest", has_adapter=False) == "digest"
    assert work_model("digest", has_adapter=True) != "digest"
