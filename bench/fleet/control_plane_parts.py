"""The processes that `bench.fleet.control_plane` measures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path

import httpx
import psutil
import redis.asyncio

from bench.common.services import Process, free_port
from bench.fleet.stand_in_fleet import StandInFleet
from bench.fleet.tcp_gate import Gate
from paceline.core.machine import raise_file_limit
from paceline.core.model_folder import model_digest
from paceline.services.serve.redis_server import redis_command, wait_for_redis

CLUSTER = "bench"
START_SECONDS = 300.0
PER_HOST = 8

_PLACED = re.compile(r'^paceline:placement_cpu_seconds_bucket\{le="([^"]+)".*\} (\S+)$', re.MULTILINE)


class GatewayProcess:
    """A gateway and what it logs."""

    def __init__(self, folder: Path, number: int, model: Path, redis_url: str) -> None:
        port = free_port()
        self.name = f"gateway {number}"
        self.url = f"http://127.0.0.1:{port}"
        options = (f"--redis={redis_url}", f"--cluster={CLUSTER}", f"--port={port}", "--store=none")
        logs = ("--log-format=json", "--log-level=info")
        self.process = Process(folder / f"gateway-{number}.log", "gateway", str(model), *options, *logs)
        self._lines: list[tuple[float, str]] = []
        """Instants on time.time(), and messages."""
        self._read_to = 0

    async def wait_ready(self) -> None:
        await asyncio.to_thread(self.process.wait_for, "serving")

    def count(self, text: str) -> int:
        """Return the number of messages so far that contain a text."""
        self._read()
        return sum(text in message for _, message in self._lines)

    async def wait_for(self, text: str, times: int, seconds: float) -> None:
        """Wait until `times` messages contain a text. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                if self.count(text) >= times:
                    return
                await asyncio.sleep(0.1)

    async def moment_of(self, name: str, text: str, seconds: float) -> float:
        """Return the time, on time.time(), at which the gateway logged a message with a name and a text. Raises
        TimeoutError.
        """
        async with asyncio.timeout(seconds):
            while True:
                self._read()
                found = [at for at, message in self._lines if f" {name} " in message and text in message]
                if found:
                    return found[0]
                await asyncio.sleep(0.1)

    def _read(self) -> None:
        with self.process.log.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        whole = new.rpartition(b"\n")[0]
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, LookupError):
                entry = json.loads(line)
                self._lines.append((datetime.fromisoformat(entry["time"]).timestamp(), entry["message"]))
        self._read_to += len(whole) + bool(whole)


class Stage:
    """Redis, gateways, and processes with stand-in workers, which end with the `async with` statement."""

    def __init__(self, folder: Path, model: Path, processes: int, first_id: int) -> None:
        self._folder = folder
        self._model = model
        self._processes = processes
        self._first_id = first_id
        self._port = free_port()
        self.redis_url = f"redis://127.0.0.1:{self._port}/0"
        self.gate = Gate(self._port)
        self._gated_url = ""
        self.gateways: list[GatewayProcess] = []
        self.fleets: list[StandInFleet] = []
        self.members = 0
        """Stand-in workers and hosts that were started at first."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, folder: Path, model: Path, gateways: int, processes: int, first_id: int
    ) -> AsyncIterator[Stage]:
        raise_file_limit()
        stage = cls(folder, model, processes, first_id)
        try:
            await stage.start_redis()
            stage._gated_url = f"redis://127.0.0.1:{await stage.gate.start()}/0"
            stage.gateways = [GatewayProcess(folder, number, model, stage.redis_url) for number in range(gateways)]
            for gateway in stage.gateways:
                await gateway.wait_ready()
            yield stage
        finally:
            await stage._close()

    async def start_redis(self) -> None:
        program, *arguments = redis_command(self._folder / "redis.sock")
        listen = ("--port", str(self._port), "--bind", "127.0.0.1")
        log = self._folder / f"redis-{time.monotonic_ns()}.log"
        self.redis = Process(log, *arguments, *listen, program=[program])
        await wait_for_redis(self.redis_url, START_SECONDS)

    async def start_workers(self, workers: int, blocks: int) -> None:
        """Start `workers` workers. Every second process reaches Redis through the gate."""
        begins = [workers * number // self._processes for number in range(self._processes + 1)]
        counts = [end - begin for begin, end in itertools.pairwise(begins)]
        self.fleets = [
            await self._start(f"{chr(ord('a') + number)}-", count, blocks, is_gated=number % 2 == 1)
            for number, count in enumerate(counts)
        ]
        for fleet in self.fleets:
            await fleet.wait_ready(START_SECONDS)
        self.members = workers + sum(-(-count // PER_HOST) for count in counts)

    async def start_victim(self, prefix: str) -> StandInFleet:
        """Start a process with one worker, and its host, to be killed."""
        fleet = await self._start(prefix, 1, 0, is_gated=False)
        await fleet.wait_ready(START_SECONDS)
        return fleet

    async def _start(self, prefix: str, workers: int, blocks: int, is_gated: bool) -> StandInFleet:
        url = self._gated_url if is_gated else self.redis_url
        options = (f"--redis={url}", f"--cluster={CLUSTER}", f"--model={model_digest(self._model)}")
        counts = (
            f"--workers={workers}",
            f"--blocks={blocks}",
            f"--per-host={PER_HOST}",
            f"--first-id={self._first_id}",
        )
        return await StandInFleet.start(*options, f"--prefix={prefix}", *counts)

    async def _close(self) -> None:
        await asyncio.gather(*(fleet.kill() for fleet in self.fleets))
        for gateway in self.gateways:
            gateway.process.tell()
        for gateway in self.gateways:
            await asyncio.to_thread(gateway.process.wait)
        await self.gate.close()
        await asyncio.to_thread(self.redis.stop)

    # ---- figures

    def memory(self) -> dict[str, float]:
        """Return the memory of each gateway in MB."""
        pids = {gateway.name: gateway.process.popen.pid for gateway in self.gateways}
        return {name: psutil.Process(pid).memory_info().rss / 1e6 for name, pid in pids.items()}

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time that each gateway and all stand-ins have used so far."""
        used = {gateway.name: _cpu_seconds(gateway.process.popen.pid) for gateway in self.gateways}
        return {**used, "stand-ins": sum(_cpu_seconds(fleet.pid) for fleet in self.fleets)}

    async def all_cpu_seconds(self) -> dict[str, float]:
        """Return the same figures and the CPU time that Redis reports."""
        async with contextlib.aclosing(redis.asyncio.Redis.from_url(self.redis_url)) as client:
            info = await client.info("cpu")
        return {"Redis": info["used_cpu_sys"] + info["used_cpu_user"], **self.cpu_seconds()}

    async def placements(self) -> dict[float, float]:
        """Return, for each bound of the histogram, the number of placements of all gateways that took at most this much
        CPU time.
        """
        counts: dict[float, float] = {}
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            for gateway in self.gateways:
                text = (await client.get(f"{gateway.url}/metrics")).raise_for_status().text
                for bound, count in _PLACED.findall(text):
                    counts[float(bound)] = counts.get(float(bound), 0.0) + float(count)
        return counts


def placement_seconds(counts: Mapping[float, float]) -> dict[str, float]:
    """Return the CPU time of a placement in milliseconds, estimated from a histogram.

    Args:
        counts: for each bound in seconds, the number of placements that took at most this long.
    """
    total = counts.get(float("inf"), 0.0)
    if not total:
        return {}
    within = {
        f"placement, ms of CPU, p{share}": 1000
        * min(bound for bound, count in counts.items() if count >= total * share / 100)
        for share in (50, 99)
    }
    return {**within, "placements within 1 ms of CPU, %": 100 * counts[0.001] / total}


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
