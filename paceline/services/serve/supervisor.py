"""Starts the processes of a stack, watches them, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TextIO

from paceline.core.config import KVTransferConfig, ServeConfig
from paceline.core.machine import available_memory
from paceline.services.common.secret import make_secret
from paceline.services.common.tasks import end_tasks
from paceline.services.kvtransfer.arena import remove_stale_arenas
from paceline.services.serve import checks, welcome
from paceline.services.serve.child import Child
from paceline.services.serve.private_folder import private_folder
from paceline.services.serve.redis_server import redis_command, wait_for_redis
from paceline.services.serve.settings import stack_settings

PREPARE_SECONDS = 3600.0
"""For downloading and converting a model."""
START_SECONDS = 600.0
"""For a process to be ready; a worker reads its model in this time."""
REDIS_SECONDS = 10.0
"""For Redis to answer."""
GRACE_SECONDS = 5.0
"""For a process to end, beyond its time for draining."""

Stage = Literal["model", "gateway", "workers", "kvtransfer", "redis"]


class Supervisor:
    """One stack, from `run` to its return.

    Args:
        command: gives the command line of a role ("prepare", "kvtransfer", "decode", …) with its arguments.
    """

    def __init__(self, config: ServeConfig, command: Callable[..., Sequence[str]]) -> None:
        self._config = config
        self._command = command
        # In the order of stopping: whoever uses a service ends before it.
        self._stages: dict[Stage, list[Child]] = {
            "model": [],
            "gateway": [],
            "workers": [],
            "kvtransfer": [],
            "redis": [],
        }
        self._ended: asyncio.Queue[Child] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Serves until SIGINT, SIGTERM or SIGHUP; afterwards nothing of the stack remains.

        Raises:
            PacelineError: it cannot start, or one of its processes ended.
        """
        checks.check_config(self._config)
        checks.check_port(self._config.host, self._config.port)
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            # It holds the API key, the services' secret and the socket of Redis.
            with private_folder() as folder:
                try:
                    await self._serve(folder)
                finally:
                    await self._stop_all()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            return
        self._stop.set()
        say("Stopping. Ctrl-C again stops at once.")

    async def _serve(self, folder: Path) -> None:
        """Returns when a signal came."""
        start, watch = asyncio.create_task(self._start(folder)), asyncio.create_task(self._watch(folder))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({start, watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            if start.done() and not stop.done():
                start.result()
                await asyncio.wait({watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not stop.done():
                watch.result()
        finally:
            await end_tasks(start, watch, stop)

    async def _watch(self, folder: Path) -> None:
        """Raises when a process ends by itself. Redis is started again: heartbeats bring back what it knew."""
        while True:
            child = await self._ended.get()
            if child not in self._stages["redis"] or not child.is_ready:
                raise child.failure()
            warn(f"{child.failure()}; starting it again")
            self._stages["redis"].remove(child)
            await self._start_redis(folder / "redis.sock")

    async def _start(self, folder: Path) -> None:
        model = await self._prepare()
        checks.check_model(self._config, model)
        checks.check_memory(self._config, model, available_memory())
        redis = await self._start_redis(folder / "redis.sock")
        settings = folder / "stack.toml"
        secret = folder / "secret"
        make_secret(secret)
        settings.write_text(stack_settings(self._config, model, redis, folder.name, secret))
        kvtransfer = await self._launch("kvtransfer", "kvtransfer", "kvtransfer", f"--config={settings}")
        kv_address = await self._ready(kvtransfer)
        workers = [
            await self._launch(
                "workers",
                f"{role}-{i}",
                role,
                f"--config={settings}",
                f"--kvtransfer-address={kv_address}",
                f"--worker-id={role}-{i}",
            )
            for role, count in (("prefill", self._config.prefill), ("decode", self._config.decode))
            for i in range(count)
        ]
        gateway = await self._launch("gateway", "gateway", "gateway", f"--config={settings}")
        _, address = await asyncio.gather(
            asyncio.gather(*(self._ready(worker) for worker in workers)), self._ready(gateway)
        )
        port = int(address.rpartition(":")[2])
        await welcome.wait_until_serving(self._config.host, port)
        say(welcome.first_request(self._config, model, port))

    async def _prepare(self) -> Path:
        """The model's folder. In a process of its own, because converting takes memory that serving then lacks."""
        config = self._config
        arguments = (config.model, f"--cache-dir={config.cache_dir}", f"--quantization={config.quantization}")
        child = await Child.start("prepare", self._command("prepare", *arguments), "stdout", warn)
        self._stages["model"].append(child)
        folder = Path(await child.answer(PREPARE_SECONDS))
        await asyncio.wait({child.exited}, timeout=GRACE_SECONDS)
        return folder

    async def _start_redis(self, socket: Path) -> str:
        if self._config.redis:
            await wait_for_redis(self._config.redis, REDIS_SECONDS)
            return self._config.redis
        # Its log tells nothing to whoever did not start it; the last line is kept for a failure.
        child = await Child.start("redis", redis_command(socket), "nothing", echo=lambda line: None)
        self._enlist("redis", child)
        url = f"unix://{socket}"
        await wait_for_redis(url, REDIS_SECONDS)
        child.is_ready = True
        report(child, url)
        return url

    async def _launch(self, stage: Stage, name: str, role: str, *arguments: str) -> Child:
        child = await Child.start(name, self._command(role, *arguments), "ready-fd", warn)
        self._enlist(stage, child)
        return child

    def _enlist(self, stage: Stage, child: Child) -> None:
        self._stages[stage].append(child)
        child.exited.add_done_callback(lambda _: self._ended.put_nowait(child))

    async def _ready(self, child: Child) -> str:
        address = await child.answer(START_SECONDS)
        report(child, address)
        return address

    async def _stop_all(self) -> None:
        grace = self._config.drain_seconds + GRACE_SECONDS
        for children in self._stages.values():
            running = [child for child in children if not child.exited.done()]
            await asyncio.gather(*(child.stop(grace, self._hurry) for child in running))
        if self._stages["kvtransfer"]:
            # One that had to be killed leaves its arena behind.
            remove_stale_arenas(Path(KVTransferConfig().arena_dir))


def report(child: Child, address: str) -> None:
    say(f"  {child.name:<12} pid {child.pid:<8} {address}")


def say(text: str) -> None:
    _print(text, sys.stdout)


def warn(text: str) -> None:
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    # A terminal that was closed is no reason to leave the stack half stopped.
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)
