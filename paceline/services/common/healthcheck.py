"""A health check of one service: `python -m paceline.services.common.healthcheck 127.0.0.1:7300 [TOKEN_FILE]`.

TOKEN_FILE is the service's --auth-token-file. Exit code 0: the service takes requests; 1: it does not, because it
starts, drains or is gone; 2: wrong usage, or the service refuses the secret.
"""

from __future__ import annotations

import asyncio
import sys

from paceline.core.errors import ConfigError
from paceline.services.common.rpc import is_serving, open_channel
from paceline.services.common.secret import Secret, read_secret


async def check(address: str, secret: Secret) -> bool:
    """Return within 3 seconds whether the service at `address` (host:port) takes requests. Raises RefusedError."""
    async with open_channel(address, secret) as channel:
        return await is_serving(channel, timeout=3.0)


def main() -> int:
    if len(sys.argv) not in (2, 3) or ":" not in sys.argv[1]:
        print("usage: python -m paceline.services.common.healthcheck HOST:PORT [TOKEN_FILE]", file=sys.stderr)
        return 2
    try:
        serves = asyncio.run(check(sys.argv[1], read_secret("".join(sys.argv[2:]))))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if serves:
        return 0
    print(f"{sys.argv[1]} does not take requests", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
