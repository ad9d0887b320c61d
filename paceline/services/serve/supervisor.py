"""Starts the processes of a stack, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TextIO, get_args

from paceline.core.config import KVTransferConfig, ServeConfig
from paceline.core.machine import available_memory
from paceline.services.common.secret import make_secret
from paceline.services.common.tasks import end_tasks
from paceline.services.common.unix_socket import remove_stale_sockets
from paceline.services.kvtransfer.arena import remove_stale_arenas
from paceline.services.serve import checks, welcome
from paceline.services.serve.child import Child
from paceline.services.serve.post import Post
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

# In the order of stopping: whoever uses a service ends before it.
Stage = Literal["model", "gateway", "workers", "kvtransfer", "redis"]


class Supervisor:
    """One stack, from `run` to its return.

    Args:
        command: gives the command line of a role ("prepare", "kvtransfer", "decode", …) with its arguments.
    """

    def __init__(self, config: ServeConfig, command: Callable[..., Sequence[str]]) -> None:
        self._config = config
        self._command = command
        self._stages: dict[Stage, list[Post]] = {stage: [] for stage in get_args(Stage)}
        self._keepers: list[asyncio.Task[None]] = []
        self._broken: asyncio.Queue[BaseException] = asyncio.Queue()
        """Why a post of the stack cannot be kept filled."""
        self._serves = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Serves until SIGINT, SIGTERM or SIGHUP; afterwards nothing of the stack remains.

        Raises:
            PacelineError: it cannot start, or one of its processes keeps ending.
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
        start, broken = asyncio.create_task(self._start(folder)), asyncio.create_task(self._broken.get())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({start, broken, stop}, return_when=asyncio.FIRST_COMPLETED)
            if start.done() and not stop.done():
                start.result()
                self._serves = True
                await asyncio.wait({broken, stop}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done() and not stop.done():
                raise broken.result()
        finally:
            await end_tasks(start, broken, stop, *self._keepers)

    async def _start(self, folder: Path) -> None:
        model = await self._prepare()
        checks.check_model(self._config, model)
        checks.check_memory(self._config, model, available_memory())
        redis = await self._start_redis(folder / "redis.sock")
        settings = folder / "stack.toml"
        secret = folder / "secret"
        make_secret(secret)
        settings.write_text(stack_settings(self._config, model, redis, folder.name, secret))
        config = f"--config={settings}"
        # With a name of its own, one that is started again finds the arena of the one before.
        kvtransfer = await self._launch(
            "kvtransfer", "kvtransfer", "kvtransfer", config, f"--host-id={folder.name}", keeps_address=True
        )
        kv_address = await kvtransfer.ready()
        workers = [
            await self._launch(
                "workers", f"{role}-{i}", role, config, f"--kvtransfer-address={kv_address}", f"--worker-id={role}-{i}"
            )
            for role, count in (("prefill", self._config.prefill), ("decode", self._config.decode))
            for i in range(count)
        ]
        gateway = await self._launch("gateway", "gateway", "gateway", config, keeps_address=True)
        _, address = await asyncio.gather(asyncio.gather(*(worker.ready() for worker in workers)), gateway.ready())
        port = _port(address)
        await welcome.wait_until_serving(self._config.host, port)
        say(welcome.first_request(self._config, model, port))

    async def _prepare(self) -> Path:
        """The model's folder. In a process of its own, because converting takes memory that serving then lacks."""
        config = self._config
        arguments = (config.model, f"--cache-dir={config.cache_dir}", f"--quantization={config.quantization}")
        command = self._command("prepare", *arguments)
        post = Post(
            lambda _: Child.start("prepare", command, "stdout", warn), lambda child: child.answer(PREPARE_SECONDS), warn
        )
        self._stages["model"].append(post)
        child = await post.fill()
        folder = Path(await post.ready())
        await asyncio.wait({child.exited}, timeout=GRACE_SECONDS)
        return folder

    async def _start_redis(self, socket: Path) -> str:
        if self._config.redis:
            await wait_for_redis(self._config.redis, REDIS_SECONDS)
            return self._config.redis
        url = f"unix://{socket}"

        async def ready(child: Child) -> str:
            await wait_for_redis(url, REDIS_SECONDS)
            child.is_ready = True
            report(child, url)
            return url

        # Its log tells nothing to whoever did not start it; the last line is kept for a failure.
        command = redis_command(socket)
        post = Post(lambda _: Child.start("redis", command, "nothing", lambda line: None), ready, warn)
        await self._enlist("redis", post)
        return await post.ready()

    async def _launch(self, stage: Stage, name: str, role: str, *arguments: str, keeps_address: bool = False) -> Post:
        """Starts a service. One that others are told of at their start keeps its address when it is started again."""

        def start(address: str) -> Awaitable[Child]:
            same = [f"--port={_port(address)}"] if keeps_address and address else []
            return Child.start(name, self._command(role, *arguments, *same), "ready-fd", warn)

        async def ready(child: Child) -> str:
            address = await child.answer(START_SECONDS)
            report(child, address)
            return address

        return await self._enlist(stage, Post(start, ready, warn))

    async def _enlist(self, stage: Stage, post: Post) -> Post:
        self._stages[stage].append(post)
        await post.fill()
        keeper = asyncio.create_task(post.keep(lambda: self._serves))
        keeper.add_done_callback(self._note_end)
        self._keepers.append(keeper)
        return post

    def _note_end(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()):
            self._broken.put_nowait(error)

    async def _stop_all(self) -> None:
        grace = self._config.drain_seconds + GRACE_SECONDS
        for posts in self._stages.values():
            await asyncio.gather(*(post.clear(grace, self._hurry) for post in posts))
        if self._stages["kvtransfer"]:
            # One that had to be killed leaves its arena and its socket behind.
            folder = Path(KVTransferConfig().arena_dir)
            remove_stale_arenas(folder)
            remove_stale_sockets(folder)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


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
