import asyncio
import sys
from pathlib import Path

import pytest

from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer
from paceline.services.common.secret import make_secret, read_secret


async def healthcheck(*arguments: str) -> tuple[int | None, str]:
    """Run the command as a container does, and return its exit code and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.services.common.healthcheck", *arguments, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


@pytest.mark.slow
async def test_the_exit_code_follows_the_service() -> None:
    server = RpcServer("127.0.0.1", 0, Credentials())
    address = f"127.0.0.1:{await server.start()}"
    starting, draining = await healthcheck(address), await healthcheck("--alive", address)
    await server.set_ready(True)
    ready = await healthcheck(address)
    await server.close(0)
    gone, dead = await healthcheck(address), await healthcheck("--alive", address)
    refusal = (1, f"{address} does not take requests\n")
    assert (starting, ready, gone) == (refusal, (0, ""), refusal)
    assert (draining, dead) == ((0, ""), (1, f"{address} does not answer\n"))


@pytest.mark.slow
async def test_wrong_use_is_told() -> None:
    for arguments in ((), ("7300",), ("--alive",), ("a:1", "b:2", "c:3")):
        code, errors = await healthcheck(*arguments)
        assert (code, errors.startswith("usage:")) == (2, True)


@pytest.mark.slow
async def test_a_service_with_a_secret_answers_those_who_have_it(tmp_path: Path) -> None:
    file, config = tmp_path / "token", tmp_path / "paceline.toml"
    make_secret(file)
    config.write_text(f'auth-token-file = "{file}"\nmax-seqs = 7\n')
    server = RpcServer("127.0.0.1", 0, Credentials(read_secret(str(file))))
    address = f"127.0.0.1:{await server.start()}"
    await server.set_ready(True)
    assert await healthcheck(address, str(config)) == (0, "")
    code, errors = await healthcheck(address)
    assert (code, "--auth-token-file" in errors) == (2, True)
    file.chmod(0o644)
    code, errors = await healthcheck(address, str(config))
    assert (code, "chmod 600" in errors) == (2, True)
    await server.close(0)
