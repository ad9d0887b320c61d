"""The supervisor of a stack: starts its processes, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from paceline.core.config import KVTransferConfig, ServeConfig, model_configs
from paceline.core.errors import ModelError
from paceline.core.machine import available_memory
from paceline.models.files.cache import keep_within, removal_text
from paceline.services.common.secret import make_secret, read_secret
from paceline.services.common.tasks import end_tasks
from paceline.services.common.unix_socket import remove_stale_sockets
from paceline.services.kvtransfer.arena import remove_stale_arenas
from paceline.services.serve import checks, welcome
from paceline.services.serve.gpus import visible_gpus
from paceline.services.serve.managed_process import ManagedProcess
from paceline.services.serve.model_stack import ModelStack
from paceline.services.serve.output import say, warn
from paceline.services.serve.private_folder import private_folder
from paceline.services.serve.processes import REDIS_SECONDS, Processes
from paceline.services.serve.redis_server import wait_for_redis
from paceline.services.serve.settings import cache_folder, gateway_settings, models_file, served_name


class Supervisor:
    """One stack, from `run` to its return: Redis, a gateway, and a fleet for each model.

    Args:
        command: returns the command line of a role ("prepare", "kvtransfer", "decode", …) with its arguments.

    Raises:
        ConfigError: --models-file cannot be read or is not valid.
    """

    def __init__(self, config: ServeConfig, command: Callable[..., Sequence[str]]) -> None:
        self._config = config
        self._models = model_configs(config)
        self._processes = Processes(command, config.drain_seconds, visible_gpus())
        self._stacks: list[ModelStack] = []
        self._redis: ManagedProcess | None = None
        self._gateway: ManagedProcess | None = None
        self._lost: dict[ModelStack, asyncio.Task[None]] = {}
        """Fleets whose models were lost, with the tasks that stop them while other fleets serve."""
        self._broken: asyncio.Queue[BaseException] = asyncio.Queue()
        """Errors of processes without which the stack cannot run."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run the stack until SIGINT, SIGTERM or SIGHUP, then stop all of its processes and remove its files.

        Raises:
            PacelineError: the stack cannot start, or one of its processes keeps ending.
        """
        for config in self._models:
            checks.check_config(config)
        if not self._config.uds:
            checks.check_port(self._config.host, self._config.port)
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            # The folder is private because it has the API key, the services' secret and the socket of Redis.
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
            self._processes.hurry.set()
            return
        self._stop.set()
        say("Stopping. Ctrl-C again stops at once.")

    async def _serve(self, folder: Path) -> None:
        """Start the stack and wait for a signal. Raises the error of a process that cannot be kept running."""
        start, broken = asyncio.create_task(self._start(folder)), asyncio.create_task(self._broken.get())
        stop, tidying = asyncio.create_task(self._stop.wait()), None
        try:
            await asyncio.wait({start, broken, stop}, return_when=asyncio.FIRST_COMPLETED)
            if start.done() and not stop.done():
                start.result()
                self._processes.stack_serves = True
                tidying = asyncio.create_task(asyncio.to_thread(_bound_caches, self._models))
                await asyncio.wait({broken, stop}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done() and not stop.done():
                raise broken.result()
        finally:
            await end_tasks(start, broken, stop, *self._lost.values(), *([tidying] if tidying else []))
            await self._processes.end_supervisions()
            await end_tasks(*(task for stack in self._stacks for task in stack.worker_tasks()))

    async def _start(self, folder: Path) -> None:
        several = len(self._models) > 1
        shared = self._config.model_fields_set if self._config.models_file else ()
        for number, config in enumerate(self._models):
            label = f"{served_name(config)}/" if several else ""
            stack = ModelStack(config, self._processes, folder, number, label, self._note_lost, shared)
            self._stacks.append(stack)
        for stack in self._stacks:
            await stack.prepare()
        if warning := checks.check_memory([(each.config, each.folder) for each in self._stacks], available_memory()):
            warn(warning)
        redis = await self._start_redis(folder / "redis.sock")
        secret = folder / "secret"
        make_secret(secret)
        await _all(*(stack.start(redis, secret) for stack in self._stacks))
        models, settings = folder / "models.toml", folder / "gateway.toml"
        fleets = ((each.config, each.folder, each.cluster, each.socket) for each in self._stacks)
        models.write_text(models_file(fleets))
        settings.write_text(gateway_settings(self._config, models, redis, secret))
        self._gateway = self._processes.service("gateway", f"--config={settings}")
        await self._processes.start(self._gateway, lambda _, error: self._broken.put_nowait(error))
        await _all(self._gateway.ready(), *(stack.ready() for stack in self._stacks))
        names = [served_name(config) for config in self._models]
        address = self._gateway.address
        await welcome.wait_until_serving(self._config, address, names)
        clusters = [stack.cluster for stack in self._stacks]
        numerics = await welcome.numerics_in_use(redis, clusters, read_secret(str(secret)))
        first = self._stacks[0]
        say(welcome.first_request(first.config, first.folder, address, numerics, names))

    async def _start_redis(self, socket: Path) -> str:
        if self._config.redis:
            await wait_for_redis(self._config.redis, REDIS_SECONDS)
            return self._config.redis
        self._redis = self._processes.redis(socket)
        await self._processes.start(self._redis, lambda _, error: self._broken.put_nowait(error))
        return await self._redis.ready()

    def _note_lost(self, stack: ModelStack, error: BaseException) -> None:
        """Stop the fleet of a model that can no longer be served. If there is no other model, end the stack."""
        if stack in self._lost:
            return
        if not self._processes.stack_serves or len(self._lost) == len(self._stacks) - 1:
            self._broken.put_nowait(error)
        else:
            warn(f"{error}; {served_name(stack.config)} is served no more, and the other models are")
            self._lost[stack] = asyncio.create_task(self._stop_fleet(stack))

    async def _stop_fleet(self, stack: ModelStack) -> None:
        await end_tasks(*stack.worker_tasks())
        await stack.stop_scaling()
        await stack.stop_workers()

    async def _stop_all(self) -> None:
        """Stop each process before the processes that it uses."""
        await self._processes.stop(self._processes.preparing)
        await asyncio.gather(*(stack.stop_scaling() for stack in self._stacks))
        await self._processes.stop(self._gateway)
        await asyncio.gather(*(stack.stop_workers() for stack in self._stacks))
        await self._processes.stop(self._redis)
        if self._stacks:
            # A kvtransfer that had to be killed did not remove its arena and its socket.
            folder = Path(KVTransferConfig().arena_dir)
            remove_stale_arenas(folder)
            remove_stale_sockets(folder)


def _bound_caches(configs: Sequence[ServeConfig]) -> None:
    """Remove the least recently used files that Paceline has made, if they take more than --cache-size."""
    for folder, size in dict.fromkeys((cache_folder(config), config.cache_size) for config in configs):
        try:
            if removed := keep_within(folder, size):
                say(f"Removed {removal_text(removed)} from {folder}, because of --cache-size {size}.")
        except ModelError as error:
            warn(f"{error}; the stack goes on")


async def _all(*parts: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines at the same time. If one fails, end the others, so that they start no further processes."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)
