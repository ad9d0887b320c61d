"""A health check of one service: `python -m paceline.services.common.healthcheck 127.0.0.1:7300 [CONFIG_FILE]`.

CONFIG_FILE is the service's --config. The keys at its top name the secret and the certificates. Exit code 0: the
service takes requests; 1: it does not, because it starts, drains or is gone; 2: wrong usage, or it does not trust us.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from paceline.core.config import ServiceConfig
from paceline.core.config_source import load_config
from paceline.core.errors import ConfigError, UntrustedError
from paceline.services.common.credentials import Credentials, read_credentials
from paceline.services.common.rpc import is_serving, open_channel


async def check(address: str, credentials: Credentials) -> bool:
    """Return within 3 seconds whether the service at `address` (host:port) takes requests.

    Raises RefusedError or UntrustedError.
    """
    async with open_channel(address, credentials) as channel:
        return await is_serving(channel, timeout=3.0)


def main() -> int:
    if len(sys.argv) not in (2, 3) or ":" not in sys.argv[1]:
        print("usage: python -m paceline.services.common.healthcheck HOST:PORT [CONFIG_FILE]", file=sys.stderr)
        return 2
    file = Path(sys.argv[2]) if len(sys.argv) == 3 else None
    try:
        config = load_config(ServiceConfig, "", file, {})
        serves = asyncio.run(check(sys.argv[1], read_credentials(config)))
    except (ConfigError, UntrustedError) as error:
        print(error, file=sys.stderr)
        return 2
    if serves:
        return 0
    print(f"{sys.argv[1]} does not take requests", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
