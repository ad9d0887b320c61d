"""Measure copies of KV blocks between a GPU and the host's pinned arena, compared with one large copy.

    python -m bench.gpu.copies --out copies.json [--blocks 256] [--rounds 10]

Blocks are scattered on both sides, as in a pool that is in use. In "runs of 8", eight blocks at a time are adjacent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.compute.loop import machine
from bench.gpu.timing import median_seconds, pick_device
from paceline.kernels.block_copies import BlockCopies

BLOCK_BYTES = (8 << 10, 64 << 10, 512 << 10, 2 << 20)
SMALL_BLOCK_BYTES = (1 << 10, 64 << 10)


def places(blocks: int, run: int, seed: int) -> list[int]:
    """Return `blocks` of 2 * `blocks` slots in random order, in runs of `run` adjacent slots."""
    starts = torch.randperm(2 * blocks // run, generator=torch.Generator().manual_seed(seed)).tolist()
    return [start * run + index for start in starts[: blocks // run] for index in range(run)]


def measure(block_bytes: int, blocks: int, rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    shape = (2 * blocks, block_bytes // 2)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    arena = torch.zeros(shape, dtype=torch.bfloat16)
    arena = arena.pin_memory() if device.type == "cuda" else arena
    copies = BlockCopies(pool, arena)
    whole = slice(0, blocks)
    total = blocks * block_bytes
    for run in (1, 8):
        there, here = places(blocks, run, 1), places(blocks, run, 2)
        ways = {
            "to the host": lambda: copies.store(there, here).precede(),  # noqa: B023
            "to the device": lambda: copies.load(here, there).precede(),  # noqa: B023
        }
        at_best = {
            "to the host": lambda: arena[whole].copy_(pool[whole], non_blocking=True),
            "to the device": lambda: pool[whole].copy_(arena[whole], non_blocking=True),
        }
        for way, copy in ways.items():
            speed = total / median_seconds(copy, device, rounds)
            best = total / median_seconds(at_best[way], device, rounds)
            yield {"way": way, "block_bytes": block_bytes, "run": run, "bytes_per_second": speed, "share": speed / best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all figures")
    parser.add_argument("--small", action="store_true", help="few small blocks, on whatever device there is")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = pick_device(options.small)
    sizes, blocks = (SMALL_BLOCK_BYTES, 16) if options.small else (BLOCK_BYTES, options.blocks)
    results = []
    for size in sizes:
        for result in measure(size, blocks, options.rounds, device):
            results.append(result)
            print(
                f"{result['way']:<16}{size >> 10:>6} KiB, runs of {result['run']}: "
                f"{result['bytes_per_second'] / 1e9:.1f} GB/s, {result['share']:.0%} of one large copy",
                flush=True,
            )
    options.out.write_text(json.dumps({"machine": machine(device), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
