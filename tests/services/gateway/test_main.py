"""The gateway's process: its port, its start and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import connect, read_members
from paceline.services.gateway import main
from paceline.services.gateway.http.listener import listen
from paceline.services.gateway.main import run
from tests.services.gateway.conftest import PATIENCE, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT


async def test_a_taken_port_is_one_sentence() -> None:
    message = r"cannot listen on 127\.0\.0\.1:\d+ .* choose another port with --port"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=message):
        await run(GatewayConfig(port=taken.getsockname()[1], model="/nowhere"))


async def test_what_is_small_is_sent_at_once() -> None:
    """Without TCP_NODELAY the next part of an answer waits until the client has acknowledged the last packet."""
    no_delay: asyncio.Queue[int] = asyncio.Queue()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        no_delay.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    def make() -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), accept)

    with listen(GatewayConfig(port=0)) as listener:
        server = await listener.serve(make)
        host, _, port = listener.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        assert await no_delay.get() == 1
        writer.close()
        server.close()


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("", ConfigError, "needs the Hugging Face folder"),
        ("/nowhere", ConfigError, "is not a folder"),
        (".", ModelError, "tokenizer.json"),
    ],
)
async def test_a_model_that_is_not_there(tmp_path: Path, model: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await run(GatewayConfig(port=0, model=str(tmp_path) if model == "." else model))


async def test_the_gateway_joins_the_cluster_and_leaves_it(start_stack: StartStack) -> None:
    stack = await start_stack()
    client = connect(stack.redis_url)

    async def gateways() -> list[str]:
        members = await read_members(client, stack.cluster, UNSIGNED)
        return [f"http://{member.address}" for member in members if member.role == "gateway"]

    async def has_joined() -> bool:
        return await gateways() == [stack.url]

    await eventually(has_joined)
    stack.stop.set()
    await stack.gateway
    assert await gateways() == []
    await client.aclose()


async def test_the_headers_of_a_proxy_do_not_replace_the_peer(start_stack: StartStack) -> None:
    """Otherwise a web page whose name was made to point here would say that it comes from another machine."""
    stack = await start_stack(prefill=0, decode=0)
    for headers in ({}, {"X-Forwarded-For": "203.0.113.9"}):
        reply = await stack.http.get("/v1/models", headers={"Host": "evil.example", **headers})
        assert reply.status_code == 403


async def test_a_drain_lets_streams_end_and_refuses_new_requests(start_stack: StartStack) -> None:
    stack = await start_stack()
    decode = stack.workers["decode-0"]
    decode.pause_after = 3
    stream = asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=20, seed=0, stream=True))
    await eventually(lambda: decode.active == 1)
    stack.stop.set()

    async def refuses() -> bool:
        return (await stack.http.get("/health")).status_code == 503

    await eventually(refuses)
    refused = await stack.post("/v1/completions", prompt="x")
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    decode.resume.set()
    events = [json.loads(event[6:]) for event in (await stream).text.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT[:20]
    async with asyncio.timeout(PATIENCE):
        await stack.gateway


async def test_a_gateway_that_drains_accepts_no_connections_after_a_while(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "NOTICE_SECONDS", 0.0)
    stack = await start_stack()
    stack.pause_decode(after=3)
    stream = asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0, stream=True))
    await eventually(stack.has_load(1))
    stack.stop.set()

    async def is_closed() -> bool:
        async with stack.client() as another:
            try:
                await another.get("/health")
            except httpx.ConnectError:
                return True
        return False

    await eventually(is_closed)
    stack.workers["decode-0"].resume.set()
    assert (await stream).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("waiting", [False, True])
async def test_the_end_of_a_drain_is_an_error_event(start_stack: StartStack, waiting: bool) -> None:
    stack = await start_stack(drain_seconds=0.2)
    stack.http.headers["X-Event-IDs"] = "true"
    decode = stack.workers["decode-0"]
    decode.pause_after = 3
    decode.max_seqs = 0 if waiting else 1
    body = {"prompt": "x", "max_tokens": 20, "seed": 0, "stream": True}
    stream = asyncio.create_task(stack.post("/v1/completions", **body))
    await eventually(lambda: bool(decode.calls))
    stack.stop.set()
    response = await stream
    if waiting:
        assert response.status_code == 503
    else:
        assert '"code":"gateway_shutting_down"' in response.text
        assert "\n\nretry: 1000\ndata: " in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    async with asyncio.timeout(PATIENCE):
        await stack.gateway
    await eventually(lambda: decode.active == 0)


async def test_a_signal_ends_the_process(redis_server: str, toy_model: Path) -> None:
    reader, writer = os.pipe()
    config = GatewayConfig(port=0, model=str(toy_model), redis=redis_server, cluster="signals", ready_fd=writer)
    task = asyncio.create_task(run(config))
    async with asyncio.timeout(PATIENCE):
        address = (await asyncio.to_thread(os.read, reader, 100)).decode().strip()
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            assert (await http.get("/ping")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await task
    os.close(reader)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
