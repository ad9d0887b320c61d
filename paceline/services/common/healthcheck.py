"""Asks a service for its gRPC health: `python -m paceline.services.common.healthcheck 127.0.0.1:7300`.

Exit code 0: it takes requests; 1: it does not (starting, draining, gone); 2: wrong use.
"""

from __future__ import annotations

import asyncio
import sys

from paceline.services.common.rpc import is_serving, open_channel


async def check(address: str) -> bool:
    """Whether the service at `address` (host:port) takes requests; answers within seconds."""
    async with open_channel(address) as channel:
        return await is_serving(channel, timeout=3.0)


def main() -> int:
    if len(sys.argv) != 2 or ":" not in sys.argv[1]:
        print("usage: python -m paceline.services.common.healthcheck HOST:PORT", file=sys.stderr)
        return 2
    if asyncio.run(check(sys.argv[1])):
        return 0
    print(f"{sys.argv[1]} does not take requests", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
