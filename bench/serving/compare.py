"""Compare two servers with the client of bench.serving.load: same prompts, in turns. Makes a table, JSON and a picture.

    python -m bench.serving.compare ours=http://127.0.0.1:8061 theirs=http://127.0.0.1:8062 --rounds 3 \
        --start ours='paceline serve --port 8061' --start theirs='...' --out compare.json --picture compare.svg

With --start each server runs only during its own turns. Without it both must be up all the time; see
bench/common/turns.py.
"""

from __future__ import annotations

import argparse
import asyncio

from bench.common.systems import System
from bench.common.turns import add_options as add_turn_options
from bench.common.turns import compare, systems_of
from bench.common.workloads import WORKLOADS
from bench.serving.load import Round, Server, add_options, load


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.compare", description=__doc__.splitlines()[0])
    add_turn_options(parser)
    add_options(parser)
    args = parser.parse_args()
    systems = systems_of(parser, args)

    async def measure(system: System, number: int) -> Round:
        async with Server(system.url, api_key=args.api_key) as server:
            return await load(server, args.workload or list(WORKLOADS), args.seed + 2 * number, args.vocab)

    return compare(parser, args, systems, lambda *turn: asyncio.run(measure(*turn)))


if __name__ == "__main__":
    raise SystemExit(main())
