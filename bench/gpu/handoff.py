"""Measure the handoff between two processes on one GPU, in which blocks go from one worker's pool into another's.

It is compared with one large copy within the device, and with the way through the host's arena.

    python -m bench.gpu.handoff --out handoff.json [--blocks 256] [--rounds 20]

The other process has a pool like a prefill worker, and publishes the names of its blocks. This process loads blocks by
name, like a decode worker. The time is from the start of the load until the last block has arrived and is known to be
unchanged. Blocks are scattered on both sides, and all content is compared. Then the other process is killed: this
process must notice that its blocks are gone, and must still be able to copy blocks through the arena.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.compute.loop import machine
from bench.gpu.copies import BLOCK_BYTES, SMALL_BLOCK_BYTES, places
from bench.gpu.timing import median_seconds, pick_device
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.engine.pool_directory import BlockCopy
from paceline.kernels.block_copies import BlockCopies
from paceline.services.worker.shared_pools import SharedPool, SharedPools

DTYPE = torch.bfloat16


def make_pool(folder: Path, block_bytes: int, blocks: int, device: torch.device) -> tuple[SharedPool, Tensor]:
    """Return a pool with room for 2 * `blocks` blocks, and a view of its content, [slots, elements]."""
    layout = replace(make_layout((GroupShape("full", (0,), 1, 16),), DTYPE.itemsize, "bench"), slot_bytes=block_bytes)
    pool = SharedPool(folder / "bench.arena", 2 * blocks, layout, 2 * blocks, DTYPE, device)
    return pool, pool.pool.view(2 * blocks, -1)


def content(slots: list[int], elements: int) -> Tensor:
    """Return the content of these slots in the other process, [slots, elements]."""
    return torch.tensor(slots, dtype=torch.int16).unsqueeze(1).expand(-1, elements).contiguous().view(DTYPE)


def moves(blocks: int, own_slots: list[int]) -> list[BlockCopy]:
    """Return copies of scattered blocks of the other process's pool to slots of this one."""
    return [
        BlockCopy(own_slot, arena, 0, there.to_bytes(16, "big"))
        for arena, (own_slot, there) in enumerate(zip(own_slots, places(blocks, 1, 1)))
    ]


def serve(folder: Path, block_bytes: int, blocks: int, device: torch.device) -> None:
    """Run the other process until its standard input ends."""
    pool, slots = make_pool(folder, block_bytes, blocks, device)
    slots.copy_(content(list(range(2 * blocks)), slots.shape[1]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    pool.directory.publish(moves(blocks, places(blocks, 1, 1)))
    print("ready", flush=True)
    sys.stdin.read()
    pool.close()


@contextlib.contextmanager
def other_process(folder: Path, block_bytes: int, blocks: int, small: bool) -> Iterator[subprocess.Popen[str]]:
    arguments = ["--serve", str(folder), "--block-bytes", str(block_bytes), "--blocks", str(blocks)]
    command = [sys.executable, "-m", "bench.gpu.handoff", *arguments, *(["--small"] if small else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the process with the other pool does not start")
            yield process
        finally:
            process.kill()


def measure(block_bytes: int, blocks: int, rounds: int, device: torch.device, small: bool) -> dict[str, Any]:
    """Measure blocks of one size. Raises RuntimeError if blocks do not come or have wrong content."""
    total = block_bytes * blocks
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, contextlib.ExitStack() as undo:
        process = undo.enter_context(other_process(Path(name), block_bytes, blocks, small))
        own_pool, slots = make_pool(Path(name), block_bytes, blocks, device)
        undo.callback(own_pool.close)
        arena = torch.zeros(2 * blocks, slots.shape[1], dtype=DTYPE)
        arena = arena.pin_memory() if device.type == "cuda" else arena
        copies = BlockCopies(slots, arena)
        others = SharedPools(own_pool, copies)
        undo.callback(others.close)
        asked = moves(blocks, own_slots := places(blocks, 1, 2))

        def load() -> None:
            if left := others.load(asked):
                raise RuntimeError(f"{len(left)} of {blocks} blocks could not be loaded from the other process")

        def by_arena() -> None:
            copies.store(own_slots, range(blocks)).wait()
            copies.load(range(blocks), own_slots).wait()

        def one_copy() -> None:
            slots[:blocks].copy_(slots[blocks:])

        handoff = wall_seconds(load, rounds)
        there = content(places(blocks, 1, 1), slots.shape[1])
        if not torch.equal(slots[own_slots].cpu().view(torch.int16), there.view(torch.int16)):
            raise RuntimeError("the loaded blocks have wrong content")
        result = {
            "block_bytes": block_bytes,
            "bytes_per_second": total / handoff,
            "copy_bytes_per_second": total / median_seconds(one_copy, device, rounds),
            "arena_bytes_per_second": total / wall_seconds(by_arena, rounds),
        }
        process.kill()
        process.wait()
        if others.load(asked) != asked:
            raise RuntimeError("blocks came from a process that was killed")
        slots.zero_()
        by_arena()  # fails if the end of the other process has broken the device
    return result | {"share": result["bytes_per_second"] / result["copy_bytes_per_second"]}


def wall_seconds(run: Callable[[], None], rounds: int) -> float:
    """Return the median wall seconds of one run, which waits for its own end. Work on the host counts too."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--small", action="store_true", help="few small blocks, on whatever device there is")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--block-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = pick_device(options.small)
    if options.serve:
        serve(options.serve, options.block_bytes, options.blocks, device)
        sys.exit()
    if not options.out:
        parser.error("--out is missing")
    sizes, blocks = (SMALL_BLOCK_BYTES, 16) if options.small else (BLOCK_BYTES, options.blocks)
    results = []
    for size in sizes:
        results.append(result := measure(size, blocks, options.rounds, device, options.small))
        print(
            f"{blocks} blocks of {size >> 10:>5} KiB: {result['bytes_per_second'] / 1e9:.1f} GB/s, "
            f"{result['share']:.0%} of one large copy; store and load by the arena "
            f"{result['arena_bytes_per_second'] / 1e9:.1f} GB/s",
            flush=True,
        )
    options.out.write_text(json.dumps({"machine": machine(device), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
