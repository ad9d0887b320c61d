"""Unauthorized peers and hostile input do a stack of real services no harm, and tenants share no blocks."""

from __future__ import annotations

import asyncio
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
import redis
from grpc_health.v1 import health_pb2

from bench.common.services import Process, free_port
from paceline.core.errors import RefusedError
from paceline.proto import kvtransfer_pb2, worker_pb2
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import version_of
from paceline.services.common.registry import Member, beats_key, member_key, names_key
from paceline.services.common.rpc import is_serving, open_channel
from paceline.services.common.secret import Secret
from tests.fuzz.run import fuzz
from tests.fuzz.stack import ROLES, FuzzStack, fuzz_stack
from tests.services.gateway.computed_routes import bodies
from tests.stack.processes import arenas

pytestmark = pytest.mark.stack

PROMPT = list(range(80))
FEW = {"max_tokens": 2, "temperature": 0}
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (kvtransfer_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]
"""Every gRPC method of every service."""
NO_METHOD = "/paceline.v1.Nothing/Nothing"
IGNORED = re.compile(r"^paceline:members_ignored_total\{.*\} [1-9]", re.MULTILINE)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzStack]:
    with fuzz_stack(tmp_path_factory.mktemp("s")) as running:
        yield running


async def cached_tokens(stack: FuzzStack, **fields: Any) -> int:
    """Send a prompt of 80 tokens and return how many of them were cached. Its blocks must be released afterwards."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"http://{stack.addresses['gateway']}/v1/completions", json=body)
    assert (await stack.ledger())["held"] == 0
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_tenant_finds_its_own_blocks_alone(stack: FuzzStack) -> None:
    assert await cached_tokens(stack, cache_salt="one") == 0
    assert await cached_tokens(stack, cache_salt="one") == 64
    assert await cached_tokens(stack, cache_salt="two") == 0
    assert await cached_tokens(stack) == 0
    assert await cached_tokens(stack, cache_salt="two") == 64
    assert await cached_tokens(stack) == 64


SYSTEM = "You answer questions about trains, and about nothing else. "
KEYS = """
[alice]
key = "key-of-alice"
[bob]
key = "key-of-bob"
[carol]
key = "key-of-carol"
share_cache = "team"
[dave]
key = "key-of-dave"
share_cache = "team"
"""


class KeyedGateway:
    """A gateway of the stack whose clients need keys."""

    def __init__(self, stack: FuzzStack) -> None:
        folder, port = stack.folder / "keyed", free_port()
        folder.mkdir()
        (folder / "keys.toml").touch(0o600)
        (folder / "keys.toml").write_text(KEYS)
        (folder / "shared.toml").write_text(f'[trains]\ntext = "{SYSTEM}"')
        files = f"--api-keys-file={folder / 'keys.toml'}", f"--shared-prompts={folder / 'shared.toml'}"
        options = f"--config={stack.folder / 'fuzz.toml'}", f"--port={port}", "--score-tokens=y,n"
        self.url = f"http://127.0.0.1:{port}"
        self.process = Process(folder / "log", "gateway", *options, *files)
        self.process.wait_for("serving m at")

    async def tokens(self, key: str, path: str, body: dict[str, Any]) -> tuple[int, int]:
        """Send a request and return how many tokens of its prompts its key is told were cached, and computed."""
        headers = {"x-api-key": f"key-of-{key}", "x-request-id": uuid.uuid4().hex}
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            reply = await client.post(path, json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            parts = (await client.get(f"/trace/{headers['x-request-id']}", headers=headers)).json()["parts"]
        attempts = [part["attempts"][-1] for part in parts]
        cached = sum(attempt["admission"]["cached_tokens"] for attempt in attempts)
        usage = reply.json().get("usage", {})
        for place in ("prompt_tokens_details", "input_tokens_details"):
            assert usage.get(place, {}).get("cached_tokens", cached) == cached
        assert usage.get("cache_read_input_tokens", cached) == cached
        return cached, sum(attempt["prefill"]["tokens"] for attempt in attempts)


@pytest.fixture(scope="module")
def keyed(stack: FuzzStack) -> Iterator[KeyedGateway]:
    gateway = KeyedGateway(stack)
    yield gateway
    gateway.process.stop()


async def test_a_key_cannot_guess_the_prompts_of_another_one(keyed: KeyedGateway) -> None:
    def guess(pin: int) -> dict[str, Any]:
        return {
            "prompt": f"This is the bank account of Alice Liddell in Oxford, and its PIN is {pin}. Hello to you!",
            **FEW,
        }

    await keyed.tokens("alice", "/v1/completions", guess(4711))
    assert {await keyed.tokens("bob", "/v1/completions", guess(pin)) for pin in (4711, 4712)} == {(0, 87), (64, 23)}
    # Now bob knows only what he has sent himself.
    assert await keyed.tokens("bob", "/v1/completions", guess(4713)) == (64, 23)
    assert await keyed.tokens("alice", "/v1/completions", guess(4711)) == (80, 7)


@pytest.mark.parametrize("path", bodies(""))
async def test_a_prompt_of_another_key_takes_as_long_as_a_new_one(keyed: KeyedGateway, path: str) -> None:
    body = bodies(f"A text of the key of alice that she has sent to {path} and to nobody else")[path]
    first = await keyed.tokens("alice", path, body)
    again = await keyed.tokens("alice", path, body)
    assert again[0] > first[0]
    assert await keyed.tokens("bob", path, body) == first
    assert await keyed.tokens("carol", path, body) == first
    assert await keyed.tokens("dave", path, body) == again


async def test_only_the_operators_text_is_shared(keyed: KeyedGateway) -> None:
    def chat(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], **FEW}

    secret = chat("My train is the one at 10:31 from Oxford to London Paddington, which I take alone")
    shared = len("<|system|>") + len(SYSTEM)
    assert (await keyed.tokens("alice", "/v1/chat/completions", secret))[0] == 0
    assert (await keyed.tokens("alice", "/v1/chat/completions", secret))[0] > shared
    assert (await keyed.tokens("bob", "/v1/chat/completions", secret))[0] == 64 <= shared
    assert (await keyed.tokens("carol", "/v1/chat/completions", chat("Hello")))[0] == 64
    # A text that only begins like the operator's is its key's own.
    for key in ("alice", "bob"):
        other = {"messages": [{"role": "system", "content": SYSTEM[:40]}, {"role": "user", "content": "x" * 40}], **FEW}
        assert (await keyed.tokens(key, "/v1/chat/completions", other))[0] == 0


@pytest.mark.parametrize("role", ROLES[:-1])
async def test_every_service_refuses_who_lacks_the_secret(stack: FuzzStack, role: str) -> None:
    async with open_channel(stack.addresses[role], Credentials()) as channel:
        with pytest.raises(RefusedError, match="--auth-token-file"):
            await is_serving(channel, timeout=10)
    async with open_channel(stack.addresses[role], stack.credentials) as channel:
        assert await is_serving(channel, timeout=10)


async def code_of(address: str, method: str, credentials: Credentials, message: bytes | None) -> grpc.StatusCode:
    """Call a method with a message, or with none yet, and return the status. A call that goes on is ended soon."""
    async with open_channel(address, credentials) as channel:
        if message is None:
            return await channel.stream_stream(method)(timeout=3.0).code()
        return await channel.unary_unary(method)(message, timeout=3.0).code()


@pytest.mark.parametrize("method", [*METHODS, NO_METHOD])
async def test_every_method_needs_the_secret(stack: FuzzStack, method: str) -> None:
    addresses = [stack.addresses[role] for role in ROLES[:-1]]
    # Nothing is sent: whoever lacks the secret is refused before a message is read.
    strangers = Credentials(), Credentials(Secret("0123456789abcdef"))
    refused = [code_of(address, method, stranger, None) for address in addresses for stranger in strangers]
    assert set(await asyncio.gather(*refused)) == {grpc.StatusCode.UNAUTHENTICATED}
    codes = await asyncio.gather(*(code_of(address, method, stack.credentials, b"") for address in addresses))
    assert grpc.StatusCode.UNAUTHENTICATED not in codes
    is_served = any(code is not grpc.StatusCode.UNIMPLEMENTED for code in codes)
    assert is_served == (method not in (NO_METHOD, "/grpc.health.v1.Health/List"))


def test_the_secret_is_nowhere_but_in_its_file(stack: FuzzStack) -> None:
    secret = (stack.folder / "secret").read_bytes().strip()
    for role, process in stack.processes.items():
        assert secret not in process.log.read_bytes(), role
        assert secret not in Path(f"/proc/{process.popen.pid}/cmdline").read_bytes(), role
        assert secret not in Path(f"/proc/{process.popen.pid}/environ").read_bytes(), role
    assert secret not in httpx.get(f"http://{stack.addresses['gateway']}/fleet").content
    with redis.Redis.from_url(stack.redis) as client:
        keys = [key for key in client.scan_iter() if client.type(key) == b"string"]
        assert keys
        assert not [key for key in keys if secret in client.get(key)]


async def test_who_can_write_to_redis_gets_no_calls(stack: FuzzStack) -> None:
    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    forged = Member("evil", "decode", 1, f"127.0.0.1:{port}", "host").to_bytes()
    gateway = f"http://{stack.addresses['gateway']}"
    async with server, httpx.AsyncClient(timeout=30) as client:
        with redis.Redis.from_url(stack.redis) as attacker:
            attacker.set(member_key("fuzz", "evil"), forged)
            attacker.sadd(names_key("fuzz"), "evil")
            attacker.xadd(beats_key("fuzz"), {"evil": version_of(forged)})
        async with asyncio.timeout(20):
            while not IGNORED.search((await client.get(f"{gateway}/metrics")).text):
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # two looks at Redis
        assert "evil" not in (await client.get(f"{gateway}/fleet")).text
        with redis.Redis.from_url(stack.redis) as attacker:
            attacker.delete(member_key("fuzz", "evil"))
    assert connections == []
    assert "'evil' is ignored, because it is not signed" in stack.processes["gateway"].text


def test_memory_and_secret_are_for_one_user(stack: FuzzStack) -> None:
    (arena,) = arenas(psutil.Process(process.popen.pid) for process in stack.processes.values())
    for path in (arena, stack.folder / "secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_worker_with_another_secret_ends_and_says_why(stack: FuzzStack, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("not the secret of this cluster".replace(" ", "-"))
    file.chmod(0o600)
    places = (f"--redis={stack.redis}", "--cluster=fuzz", f"--kvtransfer-address={stack.addresses['kvtransfer']}")
    worker = Process(tmp_path / "log", "decode", str(stack.model), *places, f"--auth-token-file={file}")
    assert worker.popen.wait(120) == 2
    assert f"kvtransfer at {stack.addresses['kvtransfer']} refuses us" in worker.text
    assert "--auth-token-file" in worker.text


async def test_hostile_input_changes_nothing(stack: FuzzStack) -> None:
    assert await fuzz(stack, seconds=2, seed=1) == []
