"""`paceline run-batch` against a running gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.client import GatewayClient
from paceline.core.errors import InvalidRequestError
from paceline.run_batch import run_batch
from paceline.services.gateway.batch_api import routes
from tests.services.gateway.batch_api.conftest import StartBatches, line
from tests.services.gateway.conftest import Stack, eventually


class Command:
    """A command with its files."""

    def __init__(self, folder: Path, stack: Stack, lines: list[Any], url: str = "", key: str = "") -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.source.write_text("".join(json.dumps(each) + "\n" for each in lines))
        self._gateway = GatewayClient(url or stack.url, key)

    async def run(self) -> bool:
        return await asyncio.to_thread(run_batch, self.source, self.target, "", self._gateway, "24h", [])

    def answered(self) -> list[str]:
        return [json.loads(each)["custom_id"] for each in self.target.read_text().splitlines()]


async def test_each_line_gets_a_line_in_its_order(start_batches: StartBatches, tmp_path: Path) -> None:
    command = Command(tmp_path, await start_batches(), [line("b"), line("wrong", max_tokens=-1), line("a")])
    assert not await command.run()
    assert command.answered() == ["b", "wrong", "a"]


async def test_the_gateway_may_have_a_unix_socket(start_batches: StartBatches, tmp_path: Path) -> None:
    stack = await start_batches(uds=str(tmp_path / "socket"))
    command = Command(tmp_path, stack, [line("a")], f"unix:{tmp_path / 'socket'}")
    assert await command.run()
    assert command.answered() == ["a"]


async def test_a_command_that_runs_again_goes_on(start_batches: StartBatches, tmp_path: Path) -> None:
    stack = await start_batches(prefill=0, decode=0)
    command = Command(tmp_path, stack, [line("a"), line("b")])
    first = asyncio.create_task(command.run())

    async def has_begun() -> bool:
        return bool((await stack.http.get("/v1/batches")).json()["data"])

    await eventually(has_begun)
    second = asyncio.create_task(command.run())
    await stack.add("decode", "d")
    await asyncio.gather(first, second, return_exceptions=True)
    assert command.answered() == ["a", "b"]
    assert len((await stack.http.get("/v1/batches")).json()["data"]) == 1


async def test_a_file_that_is_wrong_is_refused_with_its_lines(start_batches: StartBatches, tmp_path: Path) -> None:
    command = Command(tmp_path, await start_batches(), [line("a"), line("a")])
    with pytest.raises(InvalidRequestError, match="line 2: custom_id 'a'"):
        await command.run()
    assert not command.target.exists()


async def test_lines_that_were_answered_in_time_are_written(
    start_batches: StartBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "window_seconds", lambda window: 1)
    stack = await start_batches()
    stack.pause_decode(after=2)
    command = Command(tmp_path, stack, [line("long", max_tokens=20), line("short", max_tokens=1)])
    assert not await command.run()
    long, short = (json.loads(each) for each in command.target.read_text().splitlines())
    assert (long["error"]["code"], short["response"]["status_code"]) == ("batch_expired", 200)


async def test_an_admin_does_not_take_over_the_batch_of_another_key(
    start_batches: StartBatches, tmp_path: Path
) -> None:
    stack = await start_batches(prefill=0, decode=0, api_key="client", admin_key="admin")

    async def count() -> int:
        return len((await stack.http.get("/v1/batches", headers={"authorization": "Bearer admin"})).json()["data"])

    async def begin(key: str, batches: int) -> asyncio.Task[bool]:
        (tmp_path / key).mkdir()
        command = asyncio.create_task(Command(tmp_path / key, stack, [line("a")], key=key).run())

        async def has_begun() -> bool:
            return await count() == batches

        await eventually(has_begun)
        return command

    running = [await begin("client", 1), await begin("admin", 2)]
    await stack.add("decode", "d")
    assert await asyncio.gather(*running) == [True, True]
