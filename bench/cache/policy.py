"""Measure the share of requested blocks that a cache of a given size has, for each cache policy.

    python -m bench.cache.policy conversation_trace.jsonl --blocks 1000 5000 20000
    python -m bench.cache.policy conversations documents agents
    python -m bench.cache.policy --take 100000

A trace is a file in Mooncake's format or the name of a synthetic trace. Traces are replayed against the pool and the
policies of kvtransfer, one request after the other. Each request finds its longest cached prefix, takes blocks for the
rest, uses all of them, and gives them back. The figure is the share of all blocks that were found in the cache.
`belady` knows the future: it evicts the block that is needed last. `returning` is `forecast` that also knows which
blocks are requested again, but not when. `--take` measures the time to make room for new blocks.

`--owners N` deals the conversations of each trace to N keys, each of which has its blocks for itself; 0 gives all
conversations with one system prompt to one key. With `--shared-prompts` all keys share the system prompts.

`--hints` adds rows for the first policy with hints. After each request the policy is told which of its blocks will be
requested again: after all requests (`all`), after a random half of them (`half`), or after all requests, with one of
five hints wrong (`wrong`). A wrong hint is the opposite of the truth: no hint about blocks that return, or a hint about
a whole context of which no block returns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.cache.oracles import Belady, Returning, name_of
from bench.cache.traces import SYNTHETIC, Trace, make_trace, read_trace, with_owners
from bench.serving.load import new_file, table
from paceline.core.block_pool import BlockPool
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.ranking import Name, Place
from paceline.core.cache_policy.registry import POLICIES, find_policy
from paceline.core.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


class Replayed(NamedTuple):
    asked: int
    """Blocks of all requests together."""
    found: int
    """Number of these blocks in the longest cached prefix of their request."""
    evicted: int
    seconds: float
    """CPU seconds of all work of the pool and the policy."""

    @property
    def ratio(self) -> float:
        return self.found / self.asked


QUALITIES = ("all", "half", "wrong")
_HINT_SECONDS = 300.0


def hinted_blocks(trace: Trace, quality: str, seed: int = 0) -> list[int]:
    """Return, for each request, the number of its first blocks that are hinted. The module describes the qualities."""
    draw = random.Random(f"hints/{quality}/{seed}")
    last = {block: index for index, blocks in enumerate(trace) for block in blocks}
    found = []
    for index, blocks in enumerate(trace):
        returning = sum(last[block] > index for block in blocks)  # always the first ones
        if quality == "half" and draw.random() < 0.5:
            returning = 0
        elif quality == "wrong" and draw.random() < 0.2:
            returning = 0 if returning else len(blocks)
        found.append(returning)
    return found


def replay(trace: Trace, slots: int, policy: CachePolicy, hinted: Sequence[int] = ()) -> Replayed:
    """Replay a trace against a pool of `slots` blocks. A request with more blocks uses only its first `slots`.

    Args:
        hinted: for each request, the number of its first blocks that are hinted after it; empty gives no hints.
    """
    pool = BlockPool(slots, 1, policy)
    asked = found = 0
    start = time.process_time()
    for request, count in zip(trace, hinted or itertools.repeat(0)):
        names = [name_of(block) for block in request[:slots]]
        table: list[int] = []
        for name in names:
            slot = pool.find(*name)
            if slot is None:
                break
            table.append(slot)
        asked += len(request)
        found += len(table)
        first = len(table)
        pool.reuse(table)
        table += pool.take(len(names) - first)
        for index in range(first, len(names)):
            place = Place(names[index - 1] if index else None, (index + 1) * BLOCK_TOKENS)
            pool.seal(table[index], *names[index], place)
        pool.give_back(reversed(table))
        hint = Hint(count * BLOCK_TOKENS, _HINT_SECONDS)
        for name in reversed(names[:count]):
            pool.expect(*name, hint)
    return Replayed(asked, found, pool.evicted, time.process_time() - start)


def take_times(slots: int, policy: CachePolicy, rounds: int = 300) -> list[float]:
    """Return the sorted seconds to take 100 blocks from a pool that is full of cached blocks.

    The cached contexts have 100 blocks each, and every third context has been found again once.
    """
    pool = BlockPool(slots, 1, policy)
    names = itertools.count()

    def cache(table: list[int]) -> list[Name]:
        made = [name_of(next(names)) for _ in table]
        for index, (slot, name) in enumerate(zip(table, made)):
            pool.seal(slot, *name, Place(made[index - 1] if index else None, (index + 1) * BLOCK_TOKENS))
        pool.give_back(reversed(table))
        return made

    for index in range(slots // 100):
        made = cache(pool.take(100))
        if index % 3 == 0:
            table = [slot for name in made if (slot := pool.find(*name)) is not None]
            pool.reuse(table)
            pool.give_back(reversed(table))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        table = pool.take(100)
        times.append(time.perf_counter() - start)
        cache(table)
    return sorted(times)


def measure(
    trace: Trace, sizes: list[int], names: list[str], qualities: Sequence[str] = (), seed: int = 0
) -> dict[str, dict[int, Replayed]]:
    """Replay a trace for all policies and sizes. Return the results by policy and size.

    Args:
        qualities: qualities of hints that the first policy gets in further replays.
        seed: seed of the hints.

    Raises:
        ConfigError: there is no policy with this name.
    """
    makers: dict[str, Callable[[int], CachePolicy]] = {name: find_policy(name) for name in names}
    results = {name: {size: replay(trace, size, make(size)) for size in sizes} for name, make in makers.items()}
    for quality in qualities:
        hinted, make = hinted_blocks(trace, quality, seed), makers[names[0]]
        results[f"{names[0]}, hints: {quality}"] = {size: replay(trace, size, make(size), hinted) for size in sizes}
    makers = {}
    makers["returning"] = lambda slots: Returning(slots, trace)
    makers["belady"] = lambda slots: Belady(slots, trace)
    return results | {name: {size: replay(trace, size, make(size)) for size in sizes} for name, make in makers.items()}


def rows(found: dict[str, dict[int, Replayed]]) -> list[list[str]]:
    """Make one row per policy: its name, for each size the hit ratio and its relation to LRU's and Belady's, CPU
    microseconds per block, and the number of evicted blocks."""
    lines = []
    for name, by_size in found.items():
        line = [name]
        for size, one in by_size.items():
            beside = [
                f"{one.ratio / found[other][size].ratio:.2f} {other}"
                for other in ("lru", "belady")
                if other in found and other != name and found[other][size].found
            ]
            line.append(f"{one.ratio:.4f}" + (f" ({', '.join(beside)})" if beside else ""))
        evicted = sum(one.evicted for one in by_size.values())
        blocks = sum(one.asked for one in by_size.values())
        line.append(f"{1e6 * sum(one.seconds for one in by_size.values()) / max(1, blocks):.1f}")
        lines.append([*line, str(evicted)])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cache.policy", description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"a file or one of {', '.join(SYNTHETIC)}")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 5000, 20_000], help="cache sizes in blocks")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME", help="policies [%(default)s]")
    parser.add_argument(
        "--take", type=int, metavar="SLOTS", help="time the taking of 100 blocks from a pool of this size"
    )
    parser.add_argument("--hints", nargs="*", choices=QUALITIES, default=[], help="qualities of hints [none]")
    parser.add_argument(
        "--owners",
        type=int,
        metavar="N",
        help="number of keys that share no blocks; 0 for one key for each system prompt",
    )
    parser.add_argument("--shared-prompts", action="store_true", help="all keys share the system prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of synthetic traces and of hints [%(default)s]")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    if options.shared_prompts and options.owners is None:
        parser.error("--shared-prompts needs --owners")
    if min(options.blocks) < 1 or not (options.traces or options.take):
        parser.error("name a trace or --take; cache sizes must be at least one block")
    figures = {}
    try:
        for name in options.traces:
            trace = make_trace(name, options.seed) if name in SYNTHETIC else read_trace(Path(name))
            if options.owners is not None:
                trace = with_owners(trace, options.owners, options.shared_prompts, options.seed)
            found = measure(trace, options.blocks, options.policies, options.hints, options.seed)
            asked = sum(map(len, trace))
            print(f"\n{name}: {len(trace)} requests, {asked} blocks, {len({b for r in trace for b in r})} different\n")
            header = ["policy", *(f"{size} blocks" for size in options.blocks), "CPU µs a block", "evicted"]
            print(table(header, rows(found)), flush=True)
            figures[name] = {
                policy: {size: one._asdict() | {"ratio": one.ratio} for size, one in by_size.items()}
                for policy, by_size in found.items()
            }
        if options.take:
            lines = []
            for name in options.policies:
                times = [1000 * one for one in take_times(options.take, find_policy(name)(options.take))]
                lines.append([name, f"{statistics.median(times):.2f}", f"{times[len(times) * 99 // 100]:.2f}"])
            print(table([f"100 of {options.take} blocks", "ms, median", "99 % below"], lines))
    except (ConfigError, ValueError, OSError) as error:
        print(f"bench.cache.policy: {error}", file=sys.stderr)
        return 1
    if options.out:
        options.out.write_text(json.dumps({"seed": options.seed, "traces": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
