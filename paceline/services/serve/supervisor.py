"""The supervisor of a stack: starts its processes, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from paceline.core.config import PREPARE_OPTIONS, KVTransferConfig, ServeConfig
from paceline.core.machine import available_memory
from paceline.core.options import flag
from paceline.core.progress import StatusLines
from paceline.core.speculative import parse_speculative_config, with_draft_folder
from paceline.models.draft import is_draft_name
from paceline.services.common.credentials import Credentials
from paceline.services.common.secret import make_secret, read_secret
from paceline.services.common.tasks import end_tasks
from paceline.services.common.unix_socket import remove_stale_sockets
from paceline.services.kvtransfer.arena import remove_stale_arenas
from paceline.services.serve import checks, welcome
from paceline.services.serve.child import Child
from paceline.services.serve.managed_process import ManagedProcess
from paceline.services.serve.private_folder import private_folder
from paceline.services.serve.redis_server import redis_command, wait_for_redis
from paceline.services.serve.scaling_socket import ScalingSocket
from paceline.services.serve.settings import stack_settings
from paceline.services.serve.worker_fleet import Role, Worker, WorkerFleet, tell_role

PREPARE_SECONDS = 86400.0
"""Longest time to download and convert a model, in seconds. Some models have hundreds of gigabytes."""
START_SECONDS = 600.0
"""Longest time until a started process is ready, in seconds. A worker reads its model in this time."""
REDIS_SECONDS = 10.0
"""Longest time until Redis answers, in seconds."""
GRACE_SECONDS = 5.0
"""Time that a process has to end, in addition to its time for draining, in seconds."""

Part = Literal["model", "planner", "gateway", "kvtransfer", "redis"]
"""A process of a stack that is not a worker."""


class Supervisor:
    """One stack, from `run` to its return.

    Args:
        command: returns the command line of a role ("prepare", "kvtransfer", "decode", …) with its arguments.
    """

    def __init__(self, config: ServeConfig, command: Callable[..., Sequence[str]]) -> None:
        self._config = config
        self._command = command
        self._parts: dict[Part, ManagedProcess] = {}
        self._workers: WorkerFleet | None = None
        self._scaling: ScalingSocket | None = None
        self._supervisions: list[asyncio.Task[None]] = []
        self._broken: asyncio.Queue[BaseException] = asyncio.Queue()
        """Errors of processes that cannot be kept running."""
        self._serves = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Run the stack until SIGINT, SIGTERM or SIGHUP, then stop all of its processes and remove its files.

        Raises:
            PacelineError: the stack cannot start, or one of its processes keeps ending.
        """
        checks.check_config(self._config)
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
            self._hurry.set()
            return
        self._stop.set()
        say("Stopping. Ctrl-C again stops at once.")

    async def _serve(self, folder: Path) -> None:
        """Start the stack and wait for a signal. Raises the error of a process that cannot be kept running."""
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
            workers = [] if self._workers is None else self._workers.tasks()
            await end_tasks(start, broken, stop, *self._supervisions, *workers)

    async def _start(self, folder: Path) -> None:
        model = await self._prepare_models()
        checks.check_model(self._config, model)
        if warning := checks.check_memory(self._config, model, available_memory()):
            warn(warning)
        redis = await self._start_redis(folder / "redis.sock")
        settings = folder / "stack.toml"
        secret = folder / "secret"
        make_secret(secret)
        settings.write_text(stack_settings(self._config, model, redis, folder.name, secret))
        config = f"--config={settings}"
        # By this host id a kvtransfer that is started again finds the arena of its predecessor.
        kvtransfer = await self._start_part(
            "kvtransfer", self._service("kvtransfer", config, f"--host-id={folder.name}")
        )
        worker_flags = (config, f"--kvtransfer-address={await kvtransfer.ready()}")
        self._workers = workers = WorkerFleet(
            lambda worker: self._worker(worker, *worker_flags),
            self._supervise,
            lambda process: process.stop(self._grace, self._hurry),
            partial(tell_role, Credentials(read_secret(str(secret)))),
            partial(self._check_added, model),
            say,
        )
        await workers.scale(
            {"prefill": self._config.prefill, "decode": self._config.decode, "encode": self._config.encode}
        )
        scaling = ScalingSocket(folder / "scale.sock", workers)
        await scaling.start()
        self._scaling = scaling
        gateway = await self._start_part(
            "gateway", self._service("gateway", config, f"--supervisor-socket={scaling.path}")
        )
        _, address = await asyncio.gather(workers.ready(), gateway.ready())
        if self._config.planner:
            own = self._service("planner", config, f"--supervisor-socket={scaling.path}")
            await (await self._start_part("planner", own)).ready()
        await welcome.wait_until_serving(self._config, address)
        numerics = await welcome.numerics_in_use(redis, folder.name)
        say(welcome.first_request(self._config, model, address, numerics))

    async def _prepare_models(self) -> Path:
        """Return the folder of the model. The options then have the folder of the draft model, too."""
        config = self._config
        # The draft model comes first, because it is small: its errors do not wait for the download of the model.
        speculative = parse_speculative_config(config.speculative_config)
        if speculative is not None and is_draft_name(speculative):
            draft = {"model": speculative.model, "revision": speculative.revision, "quantization": "none"}
            folder = await self._prepare("prepare (draft model)", config.model_copy(update=draft))
            text = with_draft_folder(config.speculative_config, folder)
            self._config = config.model_copy(update={"speculative_config": text})
        return await self._prepare("prepare", config)

    async def _prepare(self, name: str, config: ServeConfig) -> Path:
        """Prepare a model and return its folder. A separate process does this, so that its memory is free again."""
        options = {flag(option): getattr(config, option) for option in PREPARE_OPTIONS}
        arguments = [f"{option}={value}" for option, value in options.items() if not isinstance(value, bool)]
        arguments += [option for option, value in options.items() if value is True]
        if sys.stderr.isatty():  # the child writes to a pipe, so it would not know
            arguments.append("--live-progress")
        command = self._command("prepare", config.model, *arguments)
        echo = StatusLines(sys.stderr)
        process = ManagedProcess(
            lambda _: Child.start(name, command, "stdout", echo), lambda child: child.answer(PREPARE_SECONDS), warn
        )
        self._parts["model"] = process
        child = await process.start()
        folder = Path(await process.ready())
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

        # The user did not start this process and does not need its log. A failure still shows the last line.
        command = redis_command(socket)
        process = ManagedProcess(lambda _: Child.start("redis", command, "nothing", lambda line: None), ready, warn)
        return await (await self._start_part("redis", process)).ready()

    def _service(self, role: str, *arguments: str) -> ManagedProcess:
        """Make the process of a service that is no worker.

        It keeps its address when it is started again, because other processes were started with this address.
        """

        def launch(address: str) -> Awaitable[Child]:
            has_port = address and not address.startswith("unix:")
            same = [f"--port={address.rpartition(':')[2]}"] if has_port else []
            return Child.start(role, self._command(role, *arguments, *same), "ready-fd", warn)

        return ManagedProcess(launch, _wait_ready, warn)

    def _worker(self, worker: Worker, *arguments: str) -> ManagedProcess:
        """Make the process of a worker, which starts in the role that the worker has then."""

        def launch(address: str) -> Awaitable[Child]:
            command = self._command(worker.role, *arguments, f"--worker-id={worker.name}")
            return Child.start(worker.name, command, "ready-fd", warn)

        return ManagedProcess(launch, _wait_ready, warn)

    async def _start_part(self, part: Part, process: ManagedProcess) -> ManagedProcess:
        self._parts[part] = process
        await process.start()
        self._supervisions.append(self._supervise(process))
        return process

    def _supervise(self, process: ManagedProcess) -> asyncio.Task[None]:
        supervision = asyncio.create_task(process.supervise(lambda: self._serves))
        supervision.add_done_callback(partial(self._note_end, process))
        return supervision

    def _note_end(self, process: ManagedProcess, supervision: asyncio.Task[None]) -> None:
        if supervision.cancelled() or (error := supervision.exception()) is None:
            return
        if self._serves and self._workers is not None and self._workers.give_up(process):
            warn(f"{error}; the stack goes on without it")
        else:
            self._broken.put_nowait(error)

    def _check_added(self, model: Path, added: Mapping[Role, int]) -> None:
        """Raise ConfigError if the model or the memory allows no such workers."""
        checks.check_encode_workers(self._config, model, added.get("encode", 0))
        if self._serves:  # the first workers were checked with the rest of the stack
            checks.check_more_workers(self._config, model, sum(added.values()), available_memory())

    @property
    def _grace(self) -> float:
        """Seconds that a process has to end after SIGTERM."""
        return self._config.drain_seconds + GRACE_SECONDS

    async def _stop_all(self) -> None:
        """Stop each process before the processes that it uses."""
        if self._scaling is not None:
            await self._scaling.close()
        await self._stop_part("model")
        await self._stop_part("planner")
        await self._stop_part("gateway")
        if self._workers is not None:
            await self._workers.stop(self._grace, self._hurry)
        await self._stop_part("kvtransfer")
        await self._stop_part("redis")
        if "kvtransfer" in self._parts:
            # A kvtransfer that had to be killed did not remove its arena and its socket.
            folder = Path(KVTransferConfig().arena_dir)
            remove_stale_arenas(folder)
            remove_stale_sockets(folder)

    async def _stop_part(self, part: Part) -> None:
        if (process := self._parts.get(part)) is not None:
            await process.stop(self._grace, self._hurry)


async def _wait_ready(child: Child) -> str:
    address = await child.answer(START_SECONDS)
    report(child, address)
    return address


def report(child: Child, address: str) -> None:
    say(f"  {child.name:<12} pid {child.pid:<8} {address}")


def say(text: str) -> None:
    _print(text, sys.stdout)


def warn(text: str) -> None:
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    # If the terminal was closed, go on, because the stack must still be stopped.
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)
