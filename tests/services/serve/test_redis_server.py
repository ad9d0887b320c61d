from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.serve.child import Child
from paceline.services.serve.redis_server import redis_command, wait_for_redis


async def test_a_server_that_only_this_user_reaches(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    child = await Child.start("redis", redis_command(socket), "nothing", echo=lambda line: None)
    await wait_for_redis(f"unix://{socket}", 30.0)
    assert socket.stat().st_mode & 0o777 == 0o600
    await child.stop(30.0, asyncio.Event())
    assert await child.exited == 0
    assert os.listdir(tmp_path) == []


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(UnavailableError, match="Redis at unix:///nowhere does not answer"):
        await wait_for_redis("unix:///nowhere", 0.2)


async def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="--redis http"):
        await wait_for_redis("http://127.0.0.1", 0.2)
