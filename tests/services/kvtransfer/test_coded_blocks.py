"""Blocks of 8 bits, with the scales at the end of each tile, go to another host and to the disk without a change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.kv_layout import GroupShape, KVLayout, make_layout
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache, view_coded_pool
from paceline.kernels.codes import CODES
from paceline.kernels.native import NativeKernels
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.layout import layout_to_pb
from paceline.services.kvtransfer.transfers.disk_tier import DiskOptions, DiskTier
from tests.services.kvtransfer.kv_host import SLOT
from tests.services.kvtransfer.kv_pair import CONTEXT, TOKENS, pair
from tests.services.kvtransfer.kv_toolkit import chain
from tests.services.kvtransfer.transfers.test_disk_tier import Arena, eventually, name

KV_HEADS, HEAD_DIM, BLOCKS = 1, 64, -(-TOKENS // 16)


def coded_layout(code: str) -> KVLayout:
    layout = make_layout((GroupShape("full", (0,), KV_HEADS, HEAD_DIM).coded(code),), 2, "m")
    assert layout.slot_bytes == SLOT
    return layout


def caches_of(pool: torch.Tensor, code: str) -> LayerCache:
    return view_coded_pool(pool, SLOT, 1, KV_HEADS, 16, HEAD_DIM, CODES[code])[0]


def tables(slots: list[int]) -> GroupTables:
    positions = torch.arange(TOKENS)
    found = torch.tensor([slots], dtype=torch.int32)
    return GroupTables(16, 0, found, found[0, positions // 16].long(), positions % 16)


def stored(code: str) -> list[bytes]:
    """Return the blocks of a context whose keys and values are random."""
    pool, generator = torch.zeros(BLOCKS * SLOT, dtype=torch.uint8), torch.Generator().manual_seed(3)
    keys, values = (torch.randn(TOKENS, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    NativeKernels(1).store_kv(keys, values, caches_of(pool, code), tables(list(range(BLOCKS))))
    return [bytes(block.numpy()) for block in pool.view(BLOCKS, SLOT)]


def attend(blocks: list[bytes], code: str, slots: list[int]) -> torch.Tensor:
    """Return attention of four queries over blocks that lie in these slots of a pool."""
    pool = torch.full((max(slots) + 1, SLOT), 255, dtype=torch.uint8)
    for block, slot in zip(blocks, slots):
        pool[slot] = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    queries = torch.randn(4, 2, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    group = tables(slots)
    batch = AttentionBatch((0, 4), (TOKENS,), (group,))
    return NativeKernels(1).attention(queries, caches_of(pool.view(-1), code), batch, group, 0.125)


@pytest.mark.parametrize("code", CODES)
async def test_another_host_attends_to_the_same_bytes(code: str, tmp_path: Path) -> None:
    blocks = stored(code)
    async with pair(tmp_path, layout_to_pb(coded_layout(code))) as two:
        reserved, opened = await two.begin()
        fetching = two.fetch(reserved, opened)
        for block, slot in zip(blocks, opened.tables[0].slots):
            two.there.write(slot, block)
        await two.prefill.do(pb.Operation(seal=pb.Seal(key=opened.key, group=0, first_block=0, hashes=chain(CONTEXT))))
        await two.fill(opened)
        assert (await fetching).bytes == BLOCKS * SLOT
        slots = list(reserved.tables[0].slots[:BLOCKS])
        arrived = [two.here.read(slot) for slot in slots]
        await two.end(reserved.key)
    assert arrived == blocks
    assert torch.equal(attend(arrived, code, slots), attend(blocks, code, list(range(BLOCKS))))


@pytest.mark.parametrize("code", CODES)
async def test_the_disk_gives_the_same_bytes_back(code: str, tmp_path: Path) -> None:
    blocks, arena = stored(code), Arena()
    tier = DiskTier(DiskOptions(tmp_path, BLOCKS * SLOT), 1, arena.memory, arena.find)
    for index, block in enumerate(blocks):
        event = arena.put(index, name(index))
        arena.memory.slot(index)[:] = block
        tier.offer([event])
        await eventually(lambda index=index: tier.written_blocks == index + 1)
    arena.memory.blocks[:] = bytes(len(arena.memory.blocks))
    slots = list(range(BLOCKS))[::-1]
    assert all(await tier.read([(0, name(index), slot) for index, slot in enumerate(slots)]))
    returned = [bytes(arena.memory.slot(slot)) for slot in slots]
    await tier.close()
    assert returned == blocks
    assert torch.equal(attend(returned, code, slots), attend(blocks, code, list(range(BLOCKS))))
