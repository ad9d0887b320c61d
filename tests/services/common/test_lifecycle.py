"""A service registers its address, and ends when it is told to, whatever it is doing."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.config import WorkerConfig
from paceline.core.errors import ConfigError
from paceline.services.common.lifecycle import best_address, reachable_address, start_unless_stopped
from tests.services.gateway.toy_model import write_toy_model
from tests.tiny_checkpoints import SaveTiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WAIT = 60.0


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({"host": "127.0.0.1"}, "127.0.0.1:7"),
        ({"host": "::1"}, "[::1]:7"),
        ({"host": "10.0.0.3"}, "10.0.0.3:7"),
        ({"host": "0.0.0.0", "advertise": "decode.svc"}, "decode.svc:7"),
        ({"host": "::", "advertise": "fd00::3"}, "[fd00::3]:7"),
        ({"host": "::", "advertise": "[fd00::3]"}, "[fd00::3]:7"),
    ],
)
def test_what_is_said_is_what_is_advertised(options: dict[str, str], address: str) -> None:
    assert reachable_address(WorkerConfig(**options), 7) == address


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        (["10.0.0.3", "172.18.0.2"], "10.0.0.3"),
        (["127.0.0.1", "127.0.1.1", "172.18.0.2"], "172.18.0.2"),
        (["::1", "fe80::1%eth0", "169.254.1.1", "fd00::2"], "fd00::2"),
        (["127.0.0.1", "::1"], "127.0.0.1"),
        ([], None),
    ],
)
def test_a_loopback_is_advertised_only_where_there_is_nothing_else(candidates: list[str], best: str | None) -> None:
    assert best_address(candidates) == best


@pytest.mark.parametrize("redis", ["redis://127.0.0.1:6379", "unix:///run/redis.sock"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_advertised_as_an_address_where_a_server_can_listen(host: str, redis: str) -> None:
    address, _, port = reachable_address(WorkerConfig(host=host, redis=redis), 0).rpartition(":")
    assert port == "0"
    assert address not in ("0.0.0.0", "[::]", "127.0.1.1")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    socket.create_server((address.strip("[]"), 0), family=family).close()


def test_a_url_that_is_none_is_told_before_a_name_is_looked_up() -> None:
    with pytest.raises(ConfigError, match="--redis redis://host:abc"):
        reachable_address(WorkerConfig(host="0.0.0.0", redis="redis://host:abc"), 7)


async def test_what_starts_in_time_is_returned_and_what_fails_is_raised() -> None:
    async def start() -> int:
        return 7

    async def fail() -> int:
        raise ConfigError("no")

    assert await start_unless_stopped(start(), asyncio.Event()) == 7
    with pytest.raises(ConfigError, match=r"^no$"):
        await start_unless_stopped(fail(), asyncio.Event())


async def test_a_start_that_is_cancelled_from_outside_is_undone() -> None:
    begun, undone = asyncio.Event(), asyncio.Event()

    async def start() -> None:
        begun.set()
        try:
            await asyncio.sleep(WAIT)
        finally:
            undone.set()

    task = asyncio.create_task(start_unless_stopped(start(), asyncio.Event()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(WAIT):
        await undone.wait()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a service as a process, after the Python code in `program`."""
    processes = []

    def start(*arguments: str, program: str = "") -> subprocess.Popen[str]:
        code = f"{program}\nimport sys\nfrom paceline.cli import main\nsys.exit(main())"
        command = [sys.executable, "-c", code, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Stop a process with SIGTERM and return its exit code and output."""
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=WAIT)
    return process.returncode, said


def wait_for_reader(fifo: Path) -> int:
    """Wait until a process opens `fifo`, and let it wait for content. The caller must close the returned descriptor."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, f"nobody reads {fifo}"
            time.sleep(0.02)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT)
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_loads_its_model_ends_at_once(role: str, start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    worker = start(role, str(tmp_path))
    # From now on a thread of the worker waits for the file, and no signal can interrupt it.
    writer = wait_for_reader(tmp_path / "config.json")
    code, said = end(worker)
    os.close(writer)
    assert code == 0
    assert said.splitlines()[-1].endswith("stopped before it had started")
    assert "Traceback" not in said


def test_a_worker_that_waits_for_its_host_ends_at_once(
    start: Start, silent: socket.socket, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    worker = start("decode", str(tmp_path), f"--kvtransfer-address={address_of(silent)}")
    connection, _ = silent.accept()
    with connection:
        code, said = end(worker)
    assert code == 0
    assert "Traceback" not in said


def test_a_gateway_that_loads_its_tokenizer_ends_at_once(start: Start, tmp_path: Path) -> None:
    write_toy_model(tmp_path)
    os.mkfifo(tmp_path / "template")
    gateway = start("gateway", str(tmp_path), "--port=0", f"--chat-template={tmp_path / 'template'}")
    writer = wait_for_reader(tmp_path / "template")
    code, said = end(gateway)
    os.close(writer)
    assert code == 0
    assert "Traceback" not in said


def test_a_gateway_whose_redis_does_not_answer_ends_like_any_other(
    start: Start, silent: socket.socket, tmp_path: Path
) -> None:
    write_toy_model(tmp_path)
    gateway = start("gateway", str(tmp_path), "--port=0", f"--redis=redis://{address_of(silent)}")
    connection, _ = silent.accept()
    with connection:
        code, said = end(gateway)
    assert code == 0
    assert "Traceback" not in said


def test_a_kvtransfer_whose_redis_does_not_answer_leaves_nothing(
    start: Start, silent: socket.socket, tmp_path: Path
) -> None:
    redis = f"--redis=redis://{address_of(silent)}"
    kvtransfer = start("kvtransfer", "--port=0", "--kv-memory=1MiB", f"--arena-dir={tmp_path}", redis)
    connection, _ = silent.accept()
    with connection:
        code, said = end(kvtransfer)
    assert code == 0
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_a_process_at_once() -> None:
    program = """
import asyncio
from paceline.services.common.lifecycle import stop_on_signals

async def drain():
    stop = stop_on_signals()
    print("started", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(3600)

asyncio.run(drain())
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 130
    finally:
        process.kill()
        process.communicate()


def test_a_service_that_is_still_being_imported_ends_at_once(start: Start, tmp_path: Path) -> None:
    block_torch = (
        "import importlib.abc, sys, time\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    worker = start("decode", str(tmp_path), program=block_torch)
    assert worker.stdout is not None
    assert select.select([worker.stdout], [], [], WAIT)[0]
    assert worker.stdout.readline() == "importing\n"
    assert end(worker) == (0, "")
