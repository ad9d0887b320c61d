"""A worker that falls asleep gives the memory of its own KV pool back when nothing uses it any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import BusyError
from paceline.services.worker import worker as module
from paceline.services.worker.kv_memory import KVMemory
from tests.services.worker.conftest import StartHost
from tests.tiny_checkpoints import write_tiny


async def test_a_pool_is_given_back_after_its_last_use(
    start_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "model", "llama")
    async with start_host(tmp_path / "model", kv_pool="device") as host:
        worker = host.decode.worker
        tokens = (await host.generate([5, 6, 7], 8)).tokens
        counts, given = worker._pool.counts, list[int]()
        empty = counts()
        assert empty is not None
        used = [empty._replace(free=empty.total - 1, held=1)] * 2
        monkeypatch.setattr(worker._pool, "counts", lambda: used.pop() if used else counts())
        monkeypatch.setattr(KVMemory, "give_back", lambda memory: given.append(len(used)))
        await worker.sleep_blocks()
        assert given == [0]
        monkeypatch.setattr(module, "POOL_SECONDS", 0.1)
        used += [empty._replace(free=empty.total - 1, in_flight=1)] * 9
        with pytest.raises(BusyError, match="still in use"):
            await worker.sleep_blocks()
        assert given == [0]
        used.clear()
        await worker.wake_blocks()
        assert (await host.generate([5, 6, 7], 8)).tokens == tokens
