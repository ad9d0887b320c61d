"""Memory, threads and processes of the native kernels, and inputs that they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.choosing import Draw
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets, memory_fence

pytestmark = pytest.mark.slow

BEST = Draw(0.0, 0, 0.0, 1.0, 0, 0)
SLOTS, BLOCK_TOKENS, HEADS, HEAD_DIM = 32, 16, 16, 256
# One piece with 256 rows of results takes 256 * 4 * (256 + 2) bytes. Five tasks with 50 pieces take less than 64 MiB.
LAST_SHARED = 50 * 128
PRELUDE = """
import os, resource, signal, sys, threading, time
import torch
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.native import NativeKernels

def leave_room(megabytes):
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (megabytes << 20),) * 2)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, because it may crash."""
    # With one malloc arena, memory that a thread reserves for its first allocation is not counted as the kernel's.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def attend(kernels: NativeKernels, long_context: int) -> Tensor:
    """Attend with one query over a long context and a short prompt. Its number of pieces applies to all rows."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(SLOTS, 1, BLOCK_TOKENS, HEAD_DIM, generator=generator) for _ in range(2))
    queries = torch.randn(65, HEADS, HEAD_DIM, generator=generator)
    table = torch.arange(long_context // BLOCK_TOKENS, dtype=torch.int32) % SLOTS
    places = torch.zeros(65, dtype=torch.int64)
    group = GroupTables(BLOCK_TOKENS, 0, torch.stack([table, table.flip(0)]), places, places)
    batch = AttentionBatch((0, 1, 65), (long_context, 64), (group,))
    return kernels.attention(queries, LayerCache(keys, values), batch, group, 0.25, 0.0)


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_attention_has_the_same_bits_where_pieces_are_too_many_to_share(instruction_set: str) -> None:
    alone, together = NativeKernels(1, instruction_set), NativeKernels(5, instruction_set)
    for context in (LAST_SHARED, LAST_SHARED + 128):
        assert torch.equal(attend(together, context), attend(alone, context))


def test_attention_takes_bounded_memory() -> None:
    done = run("""
        kernels = NativeKernels(5)
        cache = LayerCache(*(torch.ones(1, 1, 16, 256) for _ in range(2)))
        places = torch.zeros(65, dtype=torch.int64)
        context = 1 << 16
        group = GroupTables(16, 0, torch.zeros(2, context // 16, dtype=torch.int32), places, places)
        batch = AttentionBatch((0, 1, 65), (context, 64), (group,))
        queries = torch.zeros(65, 16, 256)
        leave_room(256)
        print(kernels.attention(queries, cache, batch, group, 1.0, 0.0).mean().item())
    """)
    assert done.stdout == "1.0\n", done.stderr


def test_a_daemon_thread_may_compute_while_the_process_ends() -> None:
    done = run("""
        kernels = NativeKernels(2)
        weight, x = kernels.pack(torch.zeros(2048, 2048)), torch.zeros(16384, 2048)
        threading.Thread(target=lambda: kernels.linear(x, weight), daemon=True).start()
        time.sleep(0.2)  # it takes seconds
    """)
    assert done.returncode == 0, done.stderr


def test_a_fork_ends_without_the_threads_that_it_lacks() -> None:
    done = run("""
        kernels = NativeKernels(2)
        if child := os.fork():
            sys.exit(os.waitpid(child, 0)[1])
        signal.alarm(10)
        del kernels
    """)
    assert done.returncode == 0, done.stderr


def test_threads_that_cannot_be_had_are_done_without() -> None:
    done = run("""
        x = torch.ones(64, 64)
        weight = NativeKernels(1).pack(x)
        leave_room(20)  # for the stacks of two threads, not of eight
        kernels = NativeKernels(8)
        print(kernels.linear(x, weight).mean().item())
    """)
    assert done.stdout == "64.0\n", done.stderr


@pytest.mark.parametrize(("heads", "rows"), [(16384, 1), (1, 1 << 20)], ids=["of a thread", "of all threads"])
def test_memory_that_is_missing_is_an_error_and_no_end(heads: int, rows: int) -> None:
    done = run(f"""
        kernels = NativeKernels(3)
        cache = LayerCache(*(torch.ones(1, 1, 16, 256) for _ in range(2)))
        places = torch.zeros(3, dtype=torch.int64)
        group = GroupTables(16, 0, torch.zeros(3, 1, dtype=torch.int32), places, places)
        batch = AttentionBatch((0, 1, 2, 3), (16,) * 3, (group,))
        queries = torch.zeros(3, {heads}, 256)
        narrow, weight = torch.zeros({rows}, 1).bfloat16(), kernels.pack(torch.zeros(1, 1).bfloat16())
        leave_room(56)
        for _ in range(2):
            try:
                kernels.attention(queries, cache, batch, group, 1.0, 0.0)
                kernels.linear(narrow, weight)
            except MemoryError as error:
                print(error)
    """)
    assert done.stdout == 2 * "there is no memory for the intermediate values of an operation\n", done.stderr


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_a_context_longer_than_its_block_table_is_refused(instruction_set: str, window: int) -> None:
    kernels = NativeKernels(1, instruction_set)
    cache = LayerCache(*(torch.ones(4, 1, 16, 32) for _ in range(2)))
    # Reading beyond a table would find blocks of the other request.
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    place = torch.zeros(2, dtype=torch.int64)
    group = GroupTables(16, window, tables, place, place)
    for context in (33, 40, 200):
        batch = AttentionBatch((0, 1, 2), (context, 1), (group,))
        with pytest.raises(IndexError, match="block table"):
            kernels.attention(torch.ones(2, 1, 32), cache, batch, group, 1.0, 0.0)


def test_tokens_may_lie_apart() -> None:
    kernels, ids = NativeKernels(1), torch.arange(10)[::3]
    weight, frequencies = torch.randn(10, 20), torch.rand(4)
    assert torch.equal(kernels.embed(ids, kernels.pack(weight)), weight[ids])
    assert torch.equal(kernels.rotation(ids, frequencies)[0], kernels.rotation(ids.clone(), frequencies)[0])


HALF, INT32 = torch.bfloat16, torch.int32
CACHE = LayerCache(*(torch.zeros(1, 1, 16, 32) for _ in range(2)))
NO_WRITES = torch.zeros(1, dtype=torch.int64)
BLOCK = GroupTables(16, 0, torch.zeros(1, 1, dtype=INT32), NO_WRITES, NO_WRITES)


def attend_once(
    kernels: NativeKernels,
    queries: Tensor,
    cache: LayerCache,
    group: GroupTables,
    sinks: Tensor | None = None,
    last_keys: Tensor | None = None,
) -> Tensor:
    batch = AttentionBatch((0, 1), (1,), (group,), last_keys=last_keys)
    return kernels.attention(queries, cache, batch, group, 1.0, 0.0, sinks, looks_ahead=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda k, x: k.linear(x, k.pack(x), torch.zeros(1, dtype=HALF)),
        lambda k, x: k.linear(x, k.pack(x), torch.zeros(2)),
        lambda k, x: k.embed(torch.zeros(1, dtype=INT32), k.pack(x)),
        lambda k, x: k.rms_norm(x, torch.zeros(32, dtype=HALF), 1e-5),
        lambda k, x: k.rms_norm(x, torch.zeros(31), 1e-5),
        lambda k, x: k.rotation(torch.zeros(1, dtype=INT32), torch.zeros(16)),
        lambda k, x: k.rotation(NO_WRITES, torch.zeros(16).double()),
        lambda k, x: k.rotate(x[None], x.to(HALF), x),
        lambda k, x: k.rotate(x[None], x, x[:, :16]),
        lambda k, x: k.add(x, x.to(HALF)),
        lambda k, x: k.silu_and_mul(x, x[:, :16]),
        lambda k, x: k.store_kv(x[None], x[None].to(HALF), CACHE, BLOCK),
        lambda k, x: k.store_kv(x[None].to(HALF), x[None].to(HALF), CACHE, BLOCK),
        lambda k, x: attend_once(k, x[None].to(HALF), CACHE, BLOCK),
        lambda k, x: attend_once(k, x[None, :, :16], CACHE, BLOCK),
        lambda k, x: attend_once(k, x[None], LayerCache(CACHE.keys, CACHE.values.transpose(1, 2)), BLOCK),
        lambda k, x: attend_once(k, x[None], CACHE, replace(BLOCK, block_tokens=32)),
        lambda k, x: attend_once(k, x[None], CACHE, replace(BLOCK, tables=BLOCK.tables.long())),
        lambda k, x: attend_once(k, x[None], CACHE, replace(BLOCK, write_slots=NO_WRITES.int())),
        lambda k, x: attend_once(k, x[None], CACHE, BLOCK, torch.zeros(2)),
        lambda k, x: attend_once(k, x[None], CACHE, BLOCK, torch.zeros(1, dtype=HALF)),
        lambda k, x: attend_once(k, x[None], CACHE, BLOCK, last_keys=NO_WRITES.int()),
        lambda k, x: attend_once(k, x[None], CACHE, BLOCK, last_keys=torch.zeros(2, dtype=torch.int64)),
        lambda k, x: k.chooser.choose(x.to(HALF), [0], [BEST]),
    ],
)
def test_operands_of_another_type_or_shape_are_refused(call: Callable[[NativeKernels, Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r" must be \[|must be int32|the last must be 1"):
        call(NativeKernels(1), torch.zeros(1, 32))


@pytest.mark.parametrize("row", [-1, 3])
def test_tokens_of_rows_that_are_not_there_are_refused(row: int) -> None:
    with pytest.raises(IndexError, match="there are 3 rows of logits"):
        NativeKernels(1).chooser.choose(torch.zeros(3, 32), [0, row], [BEST, BEST])


def test_a_fence_needs_the_library_unless_the_processor_keeps_the_order(tmp_path: Path) -> None:
    memory_fence()()
    memory_fence(tmp_path, "x86_64")()
    with pytest.raises(ConfigError, match="not compiled"):
        memory_fence(tmp_path, "aarch64")
