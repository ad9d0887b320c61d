"""A stack starts completely or not at all, and leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from paceline.services.serve.processes import GRACE_SECONDS
from tests.services.serve.conftest import write_model

pytestmark = pytest.mark.slow

STACK = Path(__file__).with_name("toy_stack.py")
ROOT = Path(__file__).parents[3]
WAIT = 60.0


class Stack:
    """A process that runs the supervisor, and all of its output."""

    def __init__(self, config: dict[str, object], actions: dict[str, str], grace: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(STACK), json.dumps(config), json.dumps(actions), str(grace)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[str] = []
        self._arriving: queue.Queue[str | None] = queue.Queue()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def read_until(self, wanted: str) -> None:
        while not self.lines or wanted not in self.lines[-1]:
            line = self._arriving.get(timeout=WAIT)
            assert line is not None, f"{wanted!r} never came:\n{self.text}"
            self.lines.append(line)

    def read_until_all(self, *wanted: str) -> None:
        """Read until each text has come, in any order."""
        while left := [text for text in wanted if text not in self.text]:
            line = self._arriving.get(timeout=WAIT)
            assert line is not None, f"{left} never came:\n{self.text}"
            self.lines.append(line)

    def pids(self) -> dict[str, int]:
        return {match[1]: int(match[2]) for match in re.finditer(r"^  (\S+) +pid (\d+)", self.text, re.MULTILINE)}

    def addresses(self) -> dict[str, str]:
        return {match[1]: match[2] for match in re.finditer(r"^  (\S+) +pid \d+ +(\S+)", self.text, re.MULTILINE)}

    def scale(self, request: str, fleet: int = 0) -> dict[str, Any]:
        """Send one line to the supervisor, as the gateway does."""
        (folder,) = {Path(path).parent for path in re.findall(r"unix://(\S+)", self.text)}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT)
            connection.connect(str(folder / f"scale-{fleet}.sock"))
            connection.sendall(request.encode() + b"\n")
            with connection.makefile() as answers:
                answer = json.loads(answers.readline())
        assert isinstance(answer, dict)
        return answer

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait until the process has ended and return its exit code."""
        code = self.process.wait(WAIT)
        self._reader.join(WAIT)
        while (line := self._arriving.get(timeout=WAIT)) is not None:
            self.lines.append(line)
        return code

    def leftovers(self) -> list[str]:
        """Return the processes, sockets and shared memory that the output names and that still exist."""
        alive = [f"{name} {pid}" for name, pid in self.pids().items() if psutil.pid_exists(pid)]
        paths = sorted({Path(path) for path in re.findall(r"(?:arena=|unix://)(\S+)", self.text)})
        folders = [path.parent for path in paths if path.suffix == ".sock"]
        assert len(paths) >= 2
        assert len(folders) == 1
        return alive + [str(path) for path in paths + folders if path.exists()]

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self._arriving.put(line.rstrip("\n"))
        self._arriving.put(None)


Start = Callable[..., Stack]


def start_stack(
    folder: Path, /, actions: dict[str, str] | None = None, grace: float = GRACE_SECONDS, **options: object
) -> Stack:
    config = {"model": str(folder), "port": 0, "kv_memory": "1MiB", "drain_seconds": 0.5, **options}
    return Stack(config, actions or {}, grace)


@pytest.fixture
def start(model_folder: Path) -> Iterator[Start]:
    stacks: list[Stack] = []

    def start(*arguments: Any, **options: object) -> Stack:
        stacks.append(start_stack(model_folder, *arguments, **options))
        return stacks[-1]

    yield start
    for stack in stacks:
        if stack.process.poll() is None:
            stack.signal(signal.SIGINT)
            stack.end()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that serves, for tests that change nothing. Afterwards it leaves nothing behind."""
    stack = start_stack(write_model(tmp_path_factory.mktemp("serving") / "tiny-llama"))
    stack.read_until("Ctrl-C stops")
    yield stack
    stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert stack.leftovers() == []


def test_starts_all_and_stops_the_gateway_first_and_kvtransfer_after_the_workers(start: Start) -> None:
    stack = start(prefill=2, decode=1)
    stack.read_until("Ctrl-C stops")
    assert set(stack.pids()) == {"redis", "kvtransfer", "prefill-0", "prefill-1", "decode-0", "gateway"}
    assert "preparing" in stack.text
    assert '"model": "tiny-llama"' in stack.text
    stack.signal(signal.SIGTERM)
    assert stack.end() == 0
    ends = [line.removesuffix(" stopped") for line in stack.lines if line.endswith(" stopped")]
    assert ends[0] == "gateway"
    assert sorted(ends[1:4]) == ["decode", "prefill", "prefill"]
    assert ends[4] == "kvtransfer"
    assert stack.leftovers() == []


def test_all_services_share_a_secret_that_no_process_list_shows(serving: Stack) -> None:
    services = [psutil.Process(pid) for name, pid in serving.pids().items() if name != "redis"]
    settings = {each.removeprefix("--config=") for p in services for each in p.cmdline() if "--config=" in each}
    (file,) = {Path(tomllib.loads(Path(each).read_text())["auth_token_file"]) for each in settings}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = file.read_text().strip()
    assert len(secret) >= 43
    assert not [process for process in services if secret in " ".join(process.cmdline())]
    assert secret not in serving.text


def test_children_are_not_in_the_terminal_s_group(serving: Stack) -> None:
    ours = os.getpgid(serving.process.pid)
    assert all(os.getpgid(pid) != ours for pid in serving.pids().values())


def test_a_process_that_fails_to_start_is_told_with_its_last_line(start: Start) -> None:
    stack = start({"decode": "fail"})
    assert stack.end() == 1
    assert stack.lines[-1] == "decode-0 failed: there is no room"
    assert stack.leftovers() == []


def test_a_model_that_cannot_be_prepared_starts_nothing(start: Start) -> None:
    stack = start({"prepare": "fail"})
    assert stack.end() == 1
    # Processes that other tests kill leave arenas, which the next stack removes.
    assert [line for line in stack.lines if not line.startswith("removed ")] == ["prepare failed: there is no room"]


def test_a_process_that_dies_is_started_again(start: Start) -> None:
    stack = start()
    stack.read_until("Ctrl-C stops")
    for name in ("prefill-0", "decode-0", "kvtransfer", "gateway", "redis"):
        first, address = stack.pids()[name], stack.addresses()[name]
        os.kill(first, signal.SIGKILL)
        stack.read_until(f"{name} ended by SIGKILL, as when memory runs out; starting it again")
        stack.read_until(f"  {name} ")
        assert stack.pids()[name] != first
        if not name.endswith("-0"):  # other processes know these addresses
            assert stack.addresses()[name] == address
    stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert stack.leftovers() == []


def test_a_process_that_dies_before_the_stack_serves_ends_it(start: Start) -> None:
    stack = start({"decode": "hang"})
    stack.read_until("decode hangs")
    os.kill(stack.pids()["kvtransfer"], signal.SIGKILL)
    assert stack.end() == 1
    assert stack.lines[-1] == "kvtransfer ended by SIGKILL, as when memory runs out"
    assert stack.leftovers() == []


def test_a_process_that_cannot_be_started_again_ends_the_stack(start: Start) -> None:
    stack = start({"decode": "serve once"})
    stack.read_until("Ctrl-C stops")
    os.kill(stack.pids()["decode-0"], signal.SIGKILL)
    assert stack.end() == 1
    assert stack.lines[-1] == "decode-0 failed: it has served; 5 times in a row now, soon after its start"
    assert stack.leftovers() == []


@pytest.fixture
def models_file(model_folder: Path, tmp_path: Path) -> str:
    file = tmp_path / "models.toml"
    file.write_text(f'[a]\nmodel = "{model_folder}"\nprefill = 0\n["b/c"]\nmodel = "{model_folder}"\ndecode = 2\n')
    return str(file)


def test_each_model_has_a_fleet_of_its_own(start: Start, models_file: str) -> None:
    stack = start(model="", models_file=models_file)
    stack.read_until("Ctrl-C stops")
    # The first model has no prefill workers.
    own = {"a/kvtransfer", "a/decode-0", "b/c/kvtransfer", "b/c/prefill-0", "b/c/decode-0", "b/c/decode-1"}
    assert set(stack.pids()) == own | {"redis", "gateway"}
    assert "The models are a and b/c." in stack.text
    assert stack.scale("{}", 0)["prefill"]["wanted"] == 0
    assert stack.scale('{"prefill": 0}', 1)["decode"] == {"wanted": 2, "ready": 2, "draining": 0, "given_up": 0}
    stack.read_until("  b/c/prefill-0    has ended")
    stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert stack.leftovers() == []


def test_a_model_that_can_be_served_no_more_leaves_the_others_alone(start: Start, models_file: str) -> None:
    stack = start({"kvtransfer": "serve once"}, model="", models_file=models_file)
    stack.read_until("Ctrl-C stops")
    own = [psutil.Process(pid) for name, pid in stack.pids().items() if name.startswith("a/")]
    os.kill(stack.pids()["a/kvtransfer"], signal.SIGKILL)
    stack.read_until("a is served no more, and the other models are")
    psutil.wait_procs(own, timeout=WAIT)
    alive = {name for name, pid in stack.pids().items() if psutil.pid_exists(pid)}
    assert alive == {"b/c/kvtransfer", "b/c/prefill-0", "b/c/decode-0", "b/c/decode-1", "redis", "gateway"}
    os.kill(stack.pids()["b/c/kvtransfer"], signal.SIGKILL)
    assert stack.end() == 1
    assert stack.leftovers() == []


def test_ctrl_c_stops_a_stack_in_which_a_process_is_started_again(start: Start) -> None:
    stack = start({"decode": "serve once"})
    stack.read_until("Ctrl-C stops")
    os.kill(stack.pids()["decode-0"], signal.SIGKILL)
    stack.read_until("decode-0 failed: it has served; starting it again")
    stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert stack.leftovers() == []


def test_ctrl_c_stops_a_stack_that_is_still_starting(start: Start) -> None:
    stack = start({"prefill": "hang"})
    stack.read_until("prefill hangs")
    stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert "Ctrl-C stops" not in stack.text
    assert stack.leftovers() == []


@pytest.mark.parametrize("second", [True, False], ids=["at once after a second Ctrl-C", "after its time is over"])
def test_a_process_that_ignores_its_end_is_killed(start: Start, second: bool) -> None:
    stubborn = {"kvtransfer": "stubborn", "decode": "stubborn"}
    stack = start(stubborn, GRACE_SECONDS if second else 0.5, drain_seconds=100.0 if second else 0.0)
    stack.read_until("Ctrl-C stops")
    stack.signal(signal.SIGINT)
    if second:
        stack.read_until("Stopping")
        stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert stack.leftovers() == []


def test_children_end_when_the_supervisor_is_killed(start: Start) -> None:
    stack = start()
    stack.read_until("Ctrl-C stops")
    children = [psutil.Process(pid) for pid in stack.pids().values()]
    stack.signal(signal.SIGKILL)
    assert stack.end() == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=WAIT)
    assert alive == []
    # The next stack removes the files that the killed one left.
    (folder,) = (Path(path).parent for path in re.findall(r"unix://(\S+)", stack.text))
    os.utime(folder, (0, 0))
    successor = start()
    successor.read_until("Ctrl-C stops")
    assert not folder.exists()


def test_a_taken_port_is_told_before_anything_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = start(port=port)
        assert stack.end() == 1
    assert stack.lines == [f"port {port} of 127.0.0.1 is taken; choose another with --port or --host"]


def test_workers_are_added_and_the_youngest_are_drained(start: Start) -> None:
    stack = start(prefill=1, decode=1)
    stack.read_until("Ctrl-C stops")
    added = stack.scale('{"prefill": 3}')
    assert added["prefill"]["wanted"] == 3
    assert added["decode"] == {"wanted": 1, "ready": 1, "draining": 0, "given_up": 0}
    stack.read_until_all("  prefill-1 ", "  prefill-2 ")
    assert stack.scale("{}")["prefill"] == {"wanted": 3, "ready": 3, "draining": 0, "given_up": 0}
    assert stack.scale('{"prefill": 1}')["prefill"] == {"wanted": 1, "ready": 1, "draining": 2, "given_up": 0}
    stack.read_until_all("  prefill-1    has ended", "  prefill-2    has ended")
    alive = {name for name, pid in stack.pids().items() if psutil.pid_exists(pid)}
    assert alive == {"redis", "kvtransfer", "prefill-0", "decode-0", "gateway"}
    stack.scale('{"prefill": 0, "decode": 2}')
    stack.read_until("  decode-1 ")
    stack.scale('{"prefill": 1}')
    stack.read_until("  prefill-3 ")  # a worker's name is never used again
    assert "starting it again" not in stack.text
    stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert stack.leftovers() == []


def test_a_scaling_request_that_makes_no_fleet_is_refused(serving: Stack) -> None:
    for request, why in (
        ('{"drain": ["decode-7"]}', "there is no worker decode-7, or it drains already"),
        ('{"flip": {"decode-0": "prefill"}}', "no decode worker would be left"),
        ('{"flip": {"decode-0": "encode"}}', "decode-0 is decode and cannot become encode"),
        ('{"flip": ["decode-0"]}', "a scaling request is a JSON object like"),
        ('{"prefill": 65}', "prefill must be from 0 to 64, not 65"),
        ('{"paint": 1}', "there are no paint workers; scale prefill or decode or encode"),
        ('{"encode": 1}', "has no encoders that Paceline computes, so it needs no encode workers"),
        ('{"decode": "2"}', 'a scaling request is a JSON object like {"prefill": 3, "decode": 1}'),
        ("nonsense", 'a scaling request is a JSON object like {"prefill": 3, "decode": 1}'),
    ):
        assert why in serving.scale(request)["error"]
        assert serving.scale("{}")["decode"] == {"wanted": 1, "ready": 1, "draining": 0, "given_up": 0}


def test_an_added_worker_that_keeps_ending_is_given_up_and_the_stack_goes_on(start: Start) -> None:
    stack = start({"decode": "serve once"})
    stack.read_until("Ctrl-C stops")
    stack.scale('{"decode": 2}')
    stack.read_until("the stack goes on without it")
    assert stack.scale("{}")["decode"] == {"wanted": 1, "ready": 1, "draining": 0, "given_up": 1}
    stack.signal(signal.SIGINT)
    assert stack.end() == 0
    assert stack.leftovers() == []
