"""Two servers side by side: the same prompts, in turns (A B A B ...), medians and their ratio.

    python -m bench.compare ours=http://127.0.0.1:8000 theirs=http://127.0.0.1:9000 --rounds 3

Taking turns spreads what else the machine does over both. A ratio is A / B: for times below 1 is good for A, for tokens
a second above 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.load import Server, ServerError, add_options, load, table
from bench.workloads import WORKLOADS

Round = dict[str, dict[str, dict[str, float]]]
"""Workload, group, figure."""


def medians(rounds: Sequence[Round]) -> Round:
    """Figure by figure. All rounds have the same shape."""
    return {
        workload: {
            group: {
                name: statistics.median(one[workload][group][name] for one in rounds)
                for name in rounds[0][workload][group]
            }
            for group in rounds[0][workload]
        }
        for workload in rounds[0]
    }


def rows(a: Round, b: Round) -> list[list[str]]:
    """workload, group, figure, A, B, A / B."""
    return [
        [workload, group, name, f"{value:.1f}", f"{other:.1f}", f"{value / other:.2f}" if other else "-"]
        for workload, groups in a.items()
        for group, figures in groups.items()
        for name, value in figures.items()
        for other in [b[workload][group][name]]
    ]


async def compare(systems: dict[str, str], args: argparse.Namespace) -> dict[str, list[Round]]:
    """All rounds of each system. Raises ServerError where one does not answer."""
    rounds: dict[str, list[Round]] = {name: [] for name in systems}
    for number in range(args.rounds):
        for name, url in systems.items():
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr)
            async with Server(url, api_key=args.api_key) as server:
                figures = await load(server, args.workload or list(WORKLOADS), args.seed + 2 * number, args.vocab)
            rounds[name].append(figures)
    return rounds


def _system(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL")
    return name, url


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("a", type=_system, metavar="NAME=URL")
    parser.add_argument("b", type=_system, metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser)
    args = parser.parse_args()
    systems = dict([args.a, args.b])
    if len(systems) < 2 or args.rounds < 1:
        parser.error("give the two systems different names, and at least one round")
    try:
        rounds = asyncio.run(compare(systems, args))
    except ServerError as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 1
    middle: dict[str, Any] = {name: medians(rounds[name]) for name in systems}
    (name_a, a), (name_b, b) = middle.items()
    print(table(["workload", "group", "figure", name_a, name_b, f"{name_a} / {name_b}"], rows(a, b)))
    if args.json:
        json.dump({"systems": systems, "seed": args.seed, "medians": middle, "rounds": rounds}, args.json, indent=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
