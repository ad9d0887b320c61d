"""The services of one cluster, started one by one."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.common.namespaces import Host
from paceline.services.serve.redis_server import redis_command

START_SECONDS = 300.0
STOP_SECONDS = 60.0
PACELINE = (sys.executable, "-m", "paceline")
_WITHOUT_SHARED_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
"""Hides /dev/shm, which network namespaces share: a gateway would find Unix sockets of workers on the other host."""
_ROLES = ("gateway", "prefill", "decode", "encode", "kvtransfer", "redis")
"""Roles in the order in which they stop: users of a service before the service."""
_READY = {"redis": "", "gateway": " serving "}
"""Text in the output of a role's process that shows that it is ready, if it differs from that of workers."""


def free_port() -> int:
    """Return a free port below the system's ephemeral ports, which another process could get meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Process:
    """A running command of Paceline. Its output goes to a file."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        program: Sequence[str] = PACELINE,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                [*program, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> str:
        """Wait until the output contains `text` and return the output.

        Raises RuntimeError if the process ends first, or after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while text not in self.text:
            if not self.alive or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{'did not print' if self.alive else 'ended before printing'} {text!r}:\n{self.text}"
                )
            time.sleep(0.05)
        return self.text

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code. If the process does not end, kill it and raise TimeoutExpired."""
        self.tell(number)
        return self.wait()

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal if the process is alive."""
        if self.alive:
            self.popen.send_signal(number)

    def wait(self) -> int:
        """Wait for the end and return the exit code. If the process does not end, kill it and raise TimeoutExpired."""
        try:
            return self.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise


@contextlib.contextmanager
def serving(log: Path, model: str, *options: str) -> Iterator[tuple[Process, str]]:
    """Run a stack of `paceline serve`. Yield its process and URL when it is ready. Raises RuntimeError if it is not."""
    port = free_port()
    process = Process(log, "serve", model, f"--port={port}", *options)
    try:
        process.wait_for("Ready.")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.stop(signal.SIGINT)


def names_by_pid(stack: Process) -> dict[int, str]:
    """Return the names of a stack's processes by process id. The stack must be ready."""
    lines = re.findall(r"^  (\S+) +pid (\d+)", stack.text, re.MULTILINE)
    return {stack.popen.pid: "serve", **{int(pid): name for name, pid in lines}}


class Services:
    """The processes of one cluster. Redis starts at once, the others on demand. All end with the `with` statement.

    Args:
        folder: folder for the output of each process.
        hosts: the first one has Redis and the gateways. Each may have its own kvtransfer.
        options: options for all services of a role, such as kvtransfer=["--kv-memory=512MiB"].
    """

    def __init__(self, folder: Path, model: str, hosts: Sequence[Host], **options: Sequence[str]) -> None:
        self.hosts = hosts
        self.processes: dict[str, Process] = {}
        self.folder = folder
        self._model = model
        self._options = options
        self._commands: dict[str, list[str]] = {}
        self.releases: dict[str, Path] = {}
        """For each process of another release, the folder with its code, by the process's name."""
        self._starts: Counter[str] = Counter()
        self._kv_ports, self._http_port = [free_port() for _ in hosts], free_port()
        home, port = hosts[0], free_port()
        self._http_ports: dict[str, int] = {}
        self.admin_key = secrets.token_urlsafe()
        self.admin = {"Authorization": f"Bearer {self.admin_key}"}
        """Headers for routes that are for admins, because gateways may be on another host than the caller."""
        self.url = f"http://{home.ip}:{self._http_port}"
        self.redis_url = f"redis://{home.ip}:{port}/0"
        listen = ("--port", str(port), "--bind", home.ip, "--protected-mode", "no")
        self._commands["redis"] = [*home.command(), *redis_command(folder / "redis.sock"), *listen]
        self.start_again("redis")

    def start_kvtransfer(self, host: int) -> str:
        port = f"--port={self._kv_ports[host]}"
        return self._start("kvtransfer", f"kvtransfer-{host}", host, port, f"--host-id=host-{host}")

    def start_worker(self, role: str, number: int, host: int = 0, isa: str = "") -> str:
        """Start a worker and return its name. `isa` is its PACELINE_ISA, if it shall not be this process's."""
        name, kvtransfer = f"{role}-{number}", f"{self.hosts[host].ip}:{self._kv_ports[host]}"
        options = (f"--kvtransfer-address={kvtransfer}", f"--worker-id={name}")
        return self._start(role, name, host, self._model, *options, isa=isa)

    def start_gateway(self, *options: str) -> str:
        """Start a gateway and return its name. The first one is at `url`, others are at `url_of(name)`."""
        number = sum(role_of(name) == "gateway" for name in self.processes)
        name, port = (f"gateway-{number}", free_port()) if number else ("gateway", self._http_port)
        self._http_ports[name] = port
        return self._start("gateway", name, 0, self._model, f"--port={port}", *options)

    def url_of(self, gateway: str) -> str:
        return f"http://{self.hosts[0].ip}:{self._http_ports[gateway]}"

    def start_again(self, name: str) -> None:
        """Start a process that has ended again, with the same command."""
        self._starts[name] += 1
        log = self.folder / f"{name}.{self._starts[name]}.log"
        environment = {"PACELINE_ADMIN_KEY": self.admin_key} if role_of(name) == "gateway" else {}
        release = self.releases.get(name)
        where = () if release is None else ("env", f"--chdir={release}", f"PYTHONPATH={release}")
        self.processes[name] = Process(log, program=[*where, *self._commands[name]], environment=environment)

    def wait_ready(self, *names: str) -> None:
        for name in names:
            self.processes[name].wait_for(" serves at ")

    def last_words(self) -> list[str]:
        """Return the end of each process's output."""
        return [f"{name}: {process.text[-600:]}" for name, process in self.processes.items()]

    def close(self) -> None:
        with contextlib.ExitStack() as stops:  # goes on if one stop fails
            for role in reversed(_ROLES):
                fellows = [process for name, process in self.processes.items() if role_of(name) == role]
                for act in (Process.wait, Process.tell):  # callbacks run in reverse order
                    for process in fellows:
                        stops.callback(act, process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def living(self, role: str) -> list[int]:
        """Return the process ids of this role's processes that are ready."""
        return sorted(
            process.popen.pid
            for name, process in self.processes.items()
            if role_of(name) == role and process.alive and _READY.get(role, " serves at ") in process.text
        )

    def _start(self, role: str, name: str, host: int, *arguments: str, isa: str = "") -> str:
        where = self.hosts[host]
        own = [*self._options.get(role, ()), f"--host={where.ip}", f"--redis={self.redis_url}"]
        apart = _WITHOUT_SHARED_MEMORY if role == "gateway" and where.namespace else ()
        environment = ("env", f"PACELINE_ISA={isa}") if isa else ()
        self._commands[name] = [*where.command(), *apart, *environment, *PACELINE, role, *arguments, *own]
        self.start_again(name)
        return name


def role_of(name: str) -> str:
    """Return the role of the process with this name."""
    return name.partition("-")[0]
