from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.core.context import Context
from paceline.core.types import Key
from paceline.engine.runner import ModelRunner
from paceline.engine.step import Step, StepResult
from paceline.proto import common_pb2
from paceline.services.worker.make_worker import warm_up
from tests.services.worker.conftest import StartHost
from tests.tiny_checkpoints import SaveTiny


async def test_a_worker_computes_a_prompt_and_decodes_before_it_serves(
    start_host: StartHost, save_gemma3: SaveTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gemma3()
    steps: list[list[int]] = []
    execute = ModelRunner.execute

    def noted(self: ModelRunner, step: Step) -> StepResult:
        result = execute(self, step)
        steps.append([len(chunk.tokens) for chunk in result.chunks])
        return result

    monkeypatch.setattr(ModelRunner, "execute", noted)
    async with start_host(tmp_path) as host:
        assert steps == 2 * [[1], [1], [1]]
        assert host.prefill.worker.engine.stats.steps == host.decode.worker.engine.stats.steps == 0
        assert await host.all_blocks_back()
        assert (await host.ledger()).cached == 0


async def test_where_no_blocks_are_free_a_worker_serves_without_it(start_llama: StartHost) -> None:
    async with start_llama() as host:
        worker = host.decode.worker
        assert await warm_up(worker)
        assert await host.all_blocks_back()
        work, key = common_pb2.Work(), Key("r", 1, 1)
        all_tokens = (await host.ledger()).free * worker.layout.groups[0].block_tokens
        lease = await worker.intake.reserve(work, key, Context([3]), all_tokens)
        async with asyncio.timeout(10):
            assert not await warm_up(worker)
        worker.kv.release(lease.key)
        assert await host.all_blocks_back()
