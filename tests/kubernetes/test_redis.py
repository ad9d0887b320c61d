"""The Redis that compose and the manifests start wants a password, which is in no command line."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import yaml

from bench.common.services import free_port
from paceline.core.errors import UnavailableError
from paceline.services.common.redis_url import with_password
from paceline.services.common.secret import make_secret
from paceline.services.serve.redis_server import redis_command, wait_for_redis

ROOT = Path(__file__).parents[2]
IN_COMPOSE = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]["redis"]
DEPLOYMENT = next(yaml.safe_load_all((ROOT / "kubernetes" / "base" / "redis.yaml").read_text()))
(CONTAINER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
COMMANDS = {
    "compose": (IN_COMPOSE["command"], IN_COMPOSE["healthcheck"]["test"][1]),
    "kubernetes": (CONTAINER["command"], CONTAINER["readinessProbe"]["exec"]["command"][2]),
}
"""The command of the container, and its health check."""


class Shipped(NamedTuple):
    url: str
    file: Path
    """The file with the password."""
    process: subprocess.Popen[bytes]
    check: str
    """A shell command that succeeds if the server is healthy."""


@pytest.fixture(params=sorted(COMMANDS))
def shipped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shipped]:
    file, port = tmp_path / "redis", free_port()
    make_secret(file)
    if shutil.which("redis-server") is None:
        (tmp_path / "redis-server").symlink_to(redis_command(tmp_path)[0])
    (*shell, script), check = COMMANDS[request.param]
    places = {"/auth/redis": str(file), "--bind 0.0.0.0": f"--bind 127.0.0.1 --port {port} --dir {tmp_path}"}
    for shown, own in places.items():
        assert shown in script
        script = script.replace(shown, own)
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{tmp_path}"}
    process = subprocess.Popen([*shell, script], env=environment, stdout=subprocess.DEVNULL)
    check = check.replace("/auth/redis", str(file)).replace("redis-cli", f"redis-cli -p {port}")
    yield Shipped(f"redis://127.0.0.1:{port}/0", file, process, check)
    process.kill()
    process.wait(20)


async def test_who_has_the_password_is_let_in_and_nobody_else(shipped: Shipped) -> None:
    await wait_for_redis(with_password(shipped.url, str(shipped.file)), 20)
    with pytest.raises(UnavailableError, match="--redis-password-file"):
        await wait_for_redis(shipped.url, 0.2)


async def test_no_command_line_has_the_password_and_sigterm_ends_it(shipped: Shipped) -> None:
    await wait_for_redis(with_password(shipped.url, str(shipped.file)), 20)
    process = psutil.Process(shipped.process.pid)
    assert process.children() == []
    assert shipped.file.read_text().strip() not in " ".join([*process.cmdline(), *process.environ().values()])
    shipped.process.terminate()
    assert shipped.process.wait(20) == 0


async def test_it_is_healthy_while_it_runs(shipped: Shipped) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli is installed (Debian: redis-tools)")
    await wait_for_redis(with_password(shipped.url, str(shipped.file)), 20)
    assert await passes(shipped.check)
    shipped.file.write_text("another password")
    assert not await passes(shipped.check)


async def passes(check: str) -> bool:
    process = await asyncio.create_subprocess_exec("sh", "-c", check, stderr=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(20):
        return await process.wait() == 0
