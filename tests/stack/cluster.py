"""A cluster of services, with helpers for tests that send requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.common.namespaces import Host
from bench.common.services import PACELINE, Services, role_of
from paceline.services.common.certificates import CertificateFiles
from tests.stack.processes import HAND_OVER, SETTLE_SECONDS, is_settled

PROMPT = "Once upon a time there was a"
TOKENS = 96
COMPUTING = ("prefill", "decode", "encode")


class Cluster(Services):
    """A cluster that starts with Redis and one kvtransfer service for each host.

    Args:
        hosts: each host has its own arena. Workers of different hosts share no memory, as on two machines.
        lease_seconds: see --lease-seconds.
        transport: see --transport.
        kv_memory: of each host.
        certificates: for TLS between all services and for HTTPS; without them, all is in the clear.
        worker_options: further options of all workers.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        hosts: Sequence[Host] = (Host(),),
        lease_seconds: float = 10.0,
        transport: str = "auto",
        kv_memory: str = "512MiB",
        certificates: CertificateFiles | None = None,
        worker_options: Sequence[str] = (),
    ) -> None:
        worker, gateway = ("--threads=1", *worker_options), ("--served-model-name=m", HAND_OVER)
        kvtransfer = (f"--kv-memory={kv_memory}", f"--lease-seconds={lease_seconds}", f"--transport={transport}")
        if certificates is not None:
            between, https = _flags("cluster", certificates), _flags("ssl", certificates)[:2]
            worker, gateway, kvtransfer = (*worker, *between), (*gateway, *between, *https), (*kvtransfer, *between)
        workers = dict.fromkeys(("prefill", "decode", "encode"), worker)
        super().__init__(folder, str(model), hosts, **workers, kvtransfer=kvtransfer, gateway=gateway)
        self.authority = "" if certificates is None else certificates.ca_certs
        if self.authority:
            self.url = self.url.replace("http:", "https:")
        for host in range(len(hosts)):
            self.start_kvtransfer(host)

    def client(self, timeout: float) -> httpx.AsyncClient:
        """Return a client of the first gateway."""
        verify = ssl.create_default_context(cafile=self.authority) if self.authority else False
        return httpx.AsyncClient(base_url=self.url, headers=self.admin, timeout=timeout, verify=verify)

    async def wait_workers(self, count: int) -> None:
        """Wait until the gateway sees exactly `count` ready prefill, decode and encode workers."""
        async with asyncio.timeout(30):
            while True:
                try:
                    workers = (await self.fleet())["workers"]
                    ready = [w for w in workers if w["role"] in COMPUTING and w["state"] == "ready"]
                    if len(ready) == count:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def idle(self) -> None:
        """Wait until no worker reports a request. A report comes a moment after the client's answer."""
        async with asyncio.timeout(30):
            while any(w["running"] or w["waiting"] for w in (await self.fleet())["workers"]):
                await asyncio.sleep(0.05)

    async def fleet(self) -> dict[str, Any]:
        async with self.client(10) as client:
            return dict((await client.get("/fleet")).json())

    async def settled(self) -> None:
        """Wait until every running kvtransfer reports to the gateway and no host has leased or in-flight blocks."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                ledgers = [host for host in (await self.fleet())["hosts"] if "error" not in host]
                alive = [name for name, each in self.processes.items() if role_of(name) == "kvtransfer" and each.alive]
                if is_settled(ledgers) and len(ledgers) == len(alive):
                    return
                await asyncio.sleep(0.1)

    async def keep(self) -> None:
        """Restart every process that ends, as a supervisor does, until cancelled."""
        while True:
            for name, process in self.processes.items():
                if not process.alive:
                    self.start_again(name)
            await asyncio.sleep(0.25)

    def family(self) -> list[psutil.Process]:
        """Return all running processes, with those that they have started."""
        roots = [psutil.Process(process.popen.pid) for process in self.processes.values() if process.alive]
        return [each for root in roots for each in (root, *root.children(recursive=True))]

    async def stream(
        self,
        on_token: Callable[[int], None] = lambda count: None,
        prompt: str = PROMPT,
        max_tokens: int = TOKENS,
        request_id: str = "",
    ) -> str:
        """Send one greedy request and return the text of its answer."""
        headers = {"x-request-id": request_id} if request_id else {}
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text, count = "", 0
        async with (
            self.client(120) as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    count += 1
                    on_token(count)
        return text

    async def decodes(self, request_id: str) -> str:
        """Return the id of the worker that decodes a running request."""
        async with self.client(10) as client:
            told = (await client.get(f"/trace/{request_id}")).json()
        return str(told["parts"][0]["attempts"][-1]["admission"]["decode"]["worker"])

    async def trace(self, request_id: str) -> list[str]:
        """Return the lines that `paceline trace` prints for a request."""
        command = [*PACELINE, "trace", request_id, "--url", self.url, "--ssl-ca-certs", self.authority]
        environment = {**os.environ, "PACELINE_ADMIN_KEY": self.admin_key}
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def _flags(prefix: str, files: CertificateFiles) -> tuple[str, ...]:
    names = ("certfile", "keyfile", "ca-certs")
    paths = (files.certfile, files.keyfile, files.ca_certs)
    return tuple(f"--{prefix}-{name}={path}" for name, path in zip(names, paths, strict=True))
