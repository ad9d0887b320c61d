"""The memory of bodies, which all requests share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from paceline.services.gateway.http.memory import BYTE_COST, BodyMemory, RequestMemory
from tests.services.gateway.conftest import StartStack, eventually


def test_one_caller_has_half_of_the_memory_and_gives_it_back() -> None:
    memory = BodyMemory(100)
    first, second, other = (RequestMemory(memory) for _ in range(3))
    first.take("a", 30)
    first.take("a", 10)
    with pytest.raises(HTTPException) as caught:
        second.take("a", 11)
    assert (caught.value.status_code, int(caught.value.headers["Retry-After"]) > 0) == (429, True)
    other.take("b", 50)
    assert memory.used == 90
    with pytest.raises(HTTPException) as caught:
        RequestMemory(memory).take("c", 11)
    assert caught.value.status_code == 429
    first.close()
    first.close()
    second.take("a", 50)
    with pytest.raises(HTTPException) as caught:
        RequestMemory(memory).take("c", 51)
    assert caught.value.status_code == 413
    for each in (second, other):
        each.close()
    assert (memory.used, memory._of_owner) == (0, {})


async def test_bodies_that_find_no_memory_are_refused(start_stack: StartStack, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text('[a]\nkey = "a"\n[b]\nkey = "b"\n')
    stack = await start_stack(body_memory=str(200_000 * BYTE_COST), api_keys_file=str(file))
    stack.pause_decode(after=1)
    body = {"prompt": "x", "max_tokens": 9, "user": "u" * 60_000}

    async def post(key: str) -> tuple[int, str]:
        answer = await stack.http.post("/v1/completions", json=body, headers={"x-api-key": key})
        return answer.status_code, answer.headers.get("retry-after", "")

    running = asyncio.create_task(post("a"))
    await eventually(lambda: stack.workers["decode-0"].active == 1)
    status, again = await post("a")
    assert (status, again.isdecimal()) == (429, True)
    other = asyncio.create_task(post("b"))
    await eventually(lambda: stack.workers["decode-0"].active == 2)
    for worker in stack.workers.values():
        worker.resume.set()
    assert [(await each)[0] for each in (running, other)] == [200, 200]
    assert (await post("a"))[0] == 200
    body["user"] = "u" * 120_000
    assert (await post("a"))[0] == 413
