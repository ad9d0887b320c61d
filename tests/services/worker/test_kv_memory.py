from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.block_counts import Counts
from paceline.core.config import KV_TOKENS
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.engine.compute_pool import ArenaPool
from paceline.engine.device_pool import DevicePool
from paceline.services.worker.kv_memory import KVMemory, device_memory

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test")
CPU = torch.device("cpu")
ELEMENTS = LAYOUT.slot_bytes // 4


def arena(slots: int, rest: int = 0) -> torch.Tensor:
    return torch.arange(slots * ELEMENTS + rest, dtype=torch.float32)


def test_one_memory_needs_no_copies() -> None:
    memory = KVMemory(LAYOUT, arena(3))
    assert memory.slots == 3
    assert memory.copies is None
    assert isinstance(memory.compute_pool(), ArenaPool)
    assert memory.compute_pool().counts() is None


def test_a_pool_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    memory = device_memory(LAYOUT, arena(4), tmp_path / "arena", CPU, str(5 * LAYOUT.slot_bytes + 1), 64)
    assert memory.slots == 5
    assert memory.pool.dtype is torch.float32
    assert isinstance(memory.compute_pool(), DevicePool)
    assert memory.compute_pool().counts() == Counts(total=5, free=5, held=0, in_flight=0, cached=0)


@pytest.mark.parametrize("context_tokens", [64, 2 * KV_TOKENS])
def test_by_itself_it_has_room_for_the_longest_context(context_tokens: int, tmp_path: Path) -> None:
    memory = device_memory(LAYOUT, arena(4), tmp_path / "arena", CPU, "auto", context_tokens)
    assert memory.slots == LAYOUT.slots_for(max(KV_TOKENS, context_tokens))


def test_blocks_go_down_into_the_arena_and_come_back(tmp_path: Path) -> None:
    below = arena(4, rest=7)  # bytes after the last whole slot belong to no slot
    memory = device_memory(LAYOUT, below, tmp_path / "arena", CPU, str(2 * LAYOUT.slot_bytes), 64)
    assert memory.copies is not None
    memory.copies.load([3], [1]).wait()
    assert torch.equal(memory.pool[ELEMENTS:], below[3 * ELEMENTS : 4 * ELEMENTS])
    memory.copies.store([1], [0]).wait()
    assert torch.equal(below[:ELEMENTS], below[3 * ELEMENTS : 4 * ELEMENTS])


def test_only_memory_of_a_cpu_sleeps() -> None:
    KVMemory(LAYOUT, arena(1)).check_sleep()
    with pytest.raises(InvalidRequestError, match=r"device meta.*only workers on a CPU sleep"):
        KVMemory(LAYOUT, arena(1).to("meta")).check_sleep()


def test_a_pool_for_which_there_is_no_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lower it with --kv-pool-memory"):
        device_memory(LAYOUT, arena(4), tmp_path / "arena", CPU, "1000TiB", 64)
