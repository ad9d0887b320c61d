import asyncio
import sys

from paceline.services.common.rpc import RpcServer


async def healthcheck(*arguments: str) -> tuple[int | None, str]:
    """Exit code and stderr of the command, as a container runs it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.services.common.healthcheck", *arguments, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def test_the_exit_code_follows_the_service() -> None:
    server = RpcServer("127.0.0.1", 0)
    address = f"127.0.0.1:{await server.start()}"
    starting = await healthcheck(address)
    await server.set_ready(True)
    ready = await healthcheck(address)
    await server.close(0)
    gone = await healthcheck(address)
    refusal = (1, f"{address} does not take requests\n")
    assert (starting, ready, gone) == (refusal, (0, ""), refusal)


async def test_wrong_use_is_told() -> None:
    for arguments in ((), ("7300",), ("a:1", "b:2")):
        code, errors = await healthcheck(*arguments)
        assert (code, errors.startswith("usage:")) == (2, True)
