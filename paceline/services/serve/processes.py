"""Starts, restarts and stops the processes of a stack."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from paceline.core import env
from paceline.core.config import PREPARE_OPTIONS, ServeConfig
from paceline.core.options import flag
from paceline.core.progress import StatusLines
from paceline.services.common.tasks import end_tasks
from paceline.services.serve.child import Child
from paceline.services.serve.gpus import GpuPlaces
from paceline.services.serve.managed_process import ManagedProcess
from paceline.services.serve.output import say, warn
from paceline.services.serve.redis_server import redis_command, wait_for_redis
from paceline.services.serve.worker_fleet import ServedWorker

PREPARE_SECONDS = 86400.0
"""Longest time to download and convert a model, in seconds. Some models have hundreds of gigabytes."""
START_SECONDS = 600.0
"""Longest time until a started process is ready, in seconds. A worker reads its model in this time."""
REDIS_SECONDS = 10.0
"""Longest time until Redis answers, in seconds."""
GRACE_SECONDS = 5.0
"""Time that a process has to end after its time for draining, in seconds."""

OnBroken: TypeAlias = Callable[[ManagedProcess, BaseException], object]
"""A function that is called with a process that cannot be kept running, and the error."""


class Processes:
    """The common settings of the processes of one stack.

    Args:
        command: returns the command line of a role ("prepare", "kvtransfer", "decode", …) with its arguments.
        drain_seconds: time that a process has for draining, in seconds.
        gpus: GPUs for workers, as CUDA_VISIBLE_DEVICES names them; empty if they are unknown.
    """

    def __init__(self, command: Callable[..., Sequence[str]], drain_seconds: float, gpus: Sequence[str] = ()) -> None:
        self.gpus = GpuPlaces(gpus)
        self._command = command
        self._drain_seconds = drain_seconds
        self._supervisions: dict[ManagedProcess, asyncio.Task[None]] = {}
        self.hurry = asyncio.Event()
        """Set to kill processes instead of waiting until they end."""
        self.preparing: ManagedProcess | None = None
        """The process that prepares a model, if one was started."""
        self.stack_serves = False
        """Whether the stack serves, so that a process that ends is started again. Before that, its end is the end of
        the stack.
        """

    def service(self, role: str, *arguments: str, label: str = "") -> ManagedProcess:
        """Make the process of a service that is no worker.

        It keeps its address when it is started again, because other processes were started with this address.

        Args:
            label: prefix of the process's name in output.
        """

        def launch(address: str) -> Awaitable[Child]:
            has_port = address and not address.startswith("unix:")
            same = [f"--port={address.rpartition(':')[2]}"] if has_port else []
            return Child.start(label + role, self._command(role, *arguments, *same), "ready-fd", warn)

        return ManagedProcess(launch, _wait_ready, warn)

    def worker(self, worker: ServedWorker, *arguments: str, label: str = "", has_gpu: bool = False) -> ManagedProcess:
        """Make the process of a worker. At each start, the process gets the role that the worker has at that time.

        Args:
            has_gpu: whether the process gets a GPU. It sees no other GPU.
        """

        async def launch(address: str) -> Child:
            command = self._command(worker.role, *arguments, f"--worker-id={worker.name}")
            name, gpu = label + worker.name, self.gpus.take() if has_gpu else None
            if gpu is None:
                return await Child.start(name, command, "ready-fd", warn)
            if self.gpus.is_shared(gpu):
                warn(f"{name} shares GPU {gpu}, because there are more workers than GPUs ({self.gpus.count})")
            try:
                child = await Child.start(name, command, "ready-fd", warn, env.with_gpu(gpu))
            except BaseException:
                self.gpus.give_back(gpu)
                raise
            child.exited.add_done_callback(lambda _: self.gpus.give_back(gpu))
            return child

        return ManagedProcess(launch, _wait_ready, warn)

    def redis(self, socket: Path) -> ManagedProcess:
        """Make the process of a Redis server that listens on `socket`."""
        url = f"unix://{socket}"

        async def ready(child: Child) -> str:
            await wait_for_redis(url, REDIS_SECONDS)
            child.is_ready = True
            report(child, url)
            return url

        # The user did not start this process and does not need its log. A failure still shows the last line.
        command = redis_command(socket)
        return ManagedProcess(lambda _: Child.start("redis", command, "nothing", lambda line: None), ready, warn)

    async def prepare(self, name: str, config: ServeConfig) -> Path:
        """Prepare a model and return its folder. A separate process does this, so that its memory is freed."""
        options = {flag(option): getattr(config, option) for option in PREPARE_OPTIONS}
        arguments = [f"{option}={value}" for option, value in options.items() if not isinstance(value, bool)]
        arguments += [option for option, value in options.items() if value is True]
        command = self._command("prepare", config.model, "--relayed", *arguments)
        echo = StatusLines(sys.stderr)
        self.preparing = process = ManagedProcess(
            lambda _: Child.start(name, command, "stdout", echo), lambda child: child.answer(PREPARE_SECONDS), warn
        )
        child = await process.start()
        folder = Path(await process.ready())
        await asyncio.wait({child.exited}, timeout=GRACE_SECONDS)
        return folder

    def supervise(self, process: ManagedProcess, on_broken: OnBroken) -> asyncio.Task[None]:
        """Return a task that starts a process again whenever it ends."""
        supervision = asyncio.create_task(process.supervise(lambda: self.stack_serves))
        supervision.add_done_callback(partial(_note_end, process, on_broken))
        return supervision

    async def start(self, process: ManagedProcess, on_broken: OnBroken) -> ManagedProcess:
        """Start a process, and start it again whenever it ends, until `stop` is called."""
        await process.start()
        self._supervisions[process] = self.supervise(process, on_broken)
        return process

    async def end_supervisions(self) -> None:
        """End all supervisions, so that no process is started again while the whole stack is stopped."""
        await end_tasks(*self._supervisions.values())

    async def stop(self, process: ManagedProcess | None) -> None:
        """Stop a process and its supervision. None does nothing."""
        if process is not None:
            if (supervision := self._supervisions.pop(process, None)) is not None:
                await end_tasks(supervision)
            await process.stop(self.grace, self.hurry)

    @property
    def grace(self) -> float:
        """Seconds that a process has to end after SIGTERM."""
        return self._drain_seconds + GRACE_SECONDS


def _note_end(process: ManagedProcess, on_broken: OnBroken, supervision: asyncio.Task[None]) -> None:
    if not supervision.cancelled() and (error := supervision.exception()) is not None:
        on_broken(process, error)


async def _wait_ready(child: Child) -> str:
    address = await child.answer(START_SECONDS)
    report(child, address)
    return address


def report(child: Child, address: str) -> None:
    say(f"  {child.name:<12} pid {child.pid:<8} {address}")
