"""Compare a cache policy with the better of LRU and ARC on every kind of synthetic trace, in caches of several sizes.

    python -m bench.cache.survey --seeds 101 102 103
    python -m bench.cache.survey --seeds 101 102 103 --hints all half wrong

The figure is the policy's hit ratio divided by the larger hit ratio of LRU and ARC: the least over all seeds. With
`--hints` it is the hit ratio with hints divided by the one without (see `bench.cache.policy` for the qualities). It is
infinite if the divisor is 0.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

from bench.cache.policy import QUALITIES, hinted_blocks, replay
from bench.cache.traces import SYNTHETIC, make_trace
from bench.serving.load import table
from paceline.core.cache_policy.registry import find_policy
from paceline.core.errors import ConfigError

RIVALS = ("lru", "arc")
SIZES = (100, 300, 500, 1000, 3000)


def compare(kind: str, seed: int, slots: int, policy: str, qualities: Sequence[str] = ()) -> Iterator[float]:
    """Yield the policy's hit ratio divided by the better rival's.

    Args:
        qualities: qualities of hints. For each, the ratio with hints divided by the one without is yielded instead.
    """
    trace = make_trace(kind, seed)

    def hit_ratio(name: str, hinted: Sequence[int] = ()) -> float:
        return replay(trace, slots, find_policy(name)(slots), hinted).ratio

    policy_ratio = hit_ratio(policy)
    if not qualities:
        better = max(map(hit_ratio, RIVALS))
        yield policy_ratio / better if better else math.inf
    for quality in qualities:
        yield hit_ratio(policy, hinted_blocks(trace, quality, seed)) / policy_ratio if policy_ratio else math.inf


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cache.survey", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="adaptive", help="policy to compare [%(default)s]")
    parser.add_argument("--traces", nargs="+", choices=SYNTHETIC, default=list(SYNTHETIC), help="traces [all]")
    parser.add_argument("--blocks", type=int, nargs="+", default=SIZES, help="cache sizes in blocks [%(default)s]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the traces [%(default)s]")
    parser.add_argument("--hints", nargs="+", choices=QUALITIES, default=[], help="qualities of hints [none]")
    options = parser.parse_args()
    columns = options.hints or ["no hints"]
    lines = []
    try:
        for kind in options.traces:
            line = [kind]
            for slots in options.blocks:
                found = [compare(kind, seed, slots, options.policy, options.hints) for seed in options.seeds]
                line.append("; ".join(f"{min(ratios):.3f}" for ratios in zip(*found, strict=True)))
            lines.append(line)
    except ConfigError as error:
        print(f"bench.cache.survey: {error}", file=sys.stderr)
        return 1
    print(f"{options.policy}, {'; '.join(columns)}, seeds {' '.join(map(str, options.seeds))}\n")
    print(table(["trace", *(f"{slots} blocks" for slots in options.blocks)], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
