"""Prefill and decode workers whose keys and values have 8 bits, with real servers and a real arena."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import WorkerConfig
from paceline.core.errors import PacelineError
from paceline.services.text_worker import add_services
from paceline.services.worker import kv_memory
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.worker_process import WorkerProcess
from paceline.services.worker.worker_setup import ComputeOptions
from tests.services.worker.conftest import StartHost, prompts
from tests.tiny_checkpoints import write_tiny

OPTIONS: dict[str, Any] = {"max_batched_tokens": 48, "kv_cache_dtype": "int8"}


@pytest.mark.parametrize(("family", "skip"), [("llama", ""), ("llama", "1"), ("granite_hybrid", "")])
async def test_handoff_gives_the_tokens_of_one_engine(
    family: str, skip: str, start_host: StartHost, tmp_path: Path
) -> None:
    heads: dict[str, object] = (
        {"head_dim": 16} if family == "llama" else {"num_attention_heads": 3, "num_key_value_heads": 3}
    )
    write_tiny(tmp_path, family, **heads)
    cases, options = prompts(6), OPTIONS | {"kv_cache_dtype_skip_layers": skip}
    async with start_host(tmp_path, **options) as host:
        alone = [(await host.generate(prompt, 24, aggregated=True)).tokens for prompt in cases]
        assert await host.all_blocks_back()
    async with start_host(tmp_path, **options) as host:  # nothing is cached
        handed = await asyncio.gather(*(host.generate(prompt, 24) for prompt in cases))
        assert [outcome.tokens for outcome in handed] == alone
        cached = await asyncio.gather(*(host.generate(prompt, 24) for prompt in cases))
        assert [outcome.tokens for outcome in cached] == alone
        assert sum(outcome.cached_tokens for outcome in cached) > 0
        assert await host.all_blocks_back()


async def test_pools_swap_coded_blocks(start_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, "llama", head_dim=16)
    cases = prompts(8)
    async with start_host(tmp_path, **OPTIONS) as host:
        alone = [(await host.generate(prompt, 24, aggregated=True)).tokens for prompt in cases]
    monkeypatch.setattr(kv_memory, "KV_TOKENS", 1)  # the pool has room for one long context
    async with start_host(tmp_path, 32 << 20, kv_pool="device", max_model_len=256, **OPTIONS) as host:
        outcomes = await asyncio.gather(*(host.generate(prompt, 24) for prompt in cases))
        assert [outcome.tokens for outcome in outcomes] == alone
        assert host.decode.worker.engine.stats.loaded_blocks > 0
        assert await host.all_blocks_back()


async def test_a_worker_with_another_type_says_so_at_its_start(start_host: StartHost, tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", head_dim=16)
    async with start_host(tmp_path, **OPTIONS) as host:
        changes = {"worker_id": "other", "kv_cache_dtype": "fp8_e4m3"}
        config = host.decode._config.model_copy(update=changes)
        with pytest.raises(PacelineError, match="its --kv-cache-dtype is fp8_e4m3, the arena's is int8"):
            await WorkerProcess.start(config, "decode", make_worker, add_services)


def test_numerics_name_the_type_of_keys_and_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    named = [
        ComputeOptions.resolve(
            WorkerConfig(model=str(tmp_path), dtype="float32", kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=skipped)
        ).numerics.dtype
        for dtype, skipped in (("auto", ""), ("int8", ""), ("fp8", "2"))
    ]
    of_fp8 = "float32 kv fp8_e4m3 --kv-cache-dtype-skip-layers 2"
    assert named == ["float32", "float32 kv int8", of_fp8]
