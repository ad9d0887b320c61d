"""A health check of one service: `python -m paceline.services.common.healthcheck [--alive] HOST:PORT [CONFIG_FILE]`.

CONFIG_FILE is the file that the service gets with --config. Its top-level keys name the secret and the certificates.
Exit code 0: the service takes requests. 1: it takes none, because it is starting, draining or gone. 2: wrong usage, or
the service does not trust this caller. With --alive, the exit code is also 0 if the service answers but takes no
requests, for example because it drains.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from grpc_health.v1 import health_pb2

from paceline.core.config import ServiceConfig
from paceline.core.config_source import load_config
from paceline.core.errors import ConfigError, UntrustedError
from paceline.services.common.auth import ANY_SERVICE
from paceline.services.common.credentials import Credentials, read_credentials
from paceline.services.common.rpc import health_of, open_channel

USAGE = "usage: python -m paceline.services.common.healthcheck [--alive] HOST:PORT [CONFIG_FILE]"


async def check(address: str, credentials: Credentials, alive: bool = False) -> bool:
    """Return within 3 seconds whether the service at `address` (host:port) takes requests.

    Args:
        alive: whether to return True for any answer of the service, even if it takes no requests.

    Raises RefusedError or UntrustedError.
    """
    async with open_channel(address, credentials, meant=ANY_SERVICE) as channel:
        health = await health_of(channel, timeout=3.0)
    return health is not None if alive else health == health_pb2.HealthCheckResponse.SERVING


def main() -> int:
    alive, arguments = "--alive" in sys.argv[1:2], sys.argv[1:]
    address, *rest = arguments[alive:] or [""]
    if len(rest) > 1 or ":" not in address:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        config = load_config(ServiceConfig, "", Path(rest[0]) if rest else None, {})
        passes = asyncio.run(check(address, read_credentials(config), alive))
    except (ConfigError, UntrustedError) as error:
        print(error, file=sys.stderr)
        return 2
    if passes:
        return 0
    print(f"{address} does not {'answer' if alive else 'take requests'}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
