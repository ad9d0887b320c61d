from __future__ import annotations

import os
import socket
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from bench.common.systems import ServerError, System, running

SERVER = """
    import http.server, os, pathlib, subprocess, sys
    port, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    # One child in the same session and one in its own; neither heeds SIGTERM.
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    for new in (False, True):
        process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=new)
        process.stdout.readline()
        (folder / str(process.pid)).touch()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def system(script: str, *arguments: object) -> System:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = (sys.executable, "-c", textwrap.dedent(script), str(port), *map(str, arguments))
    return System("toy", f"http://127.0.0.1:{port}", command)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_nothing_of_a_system_outlives_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.common.systems.STOP_SECONDS", 0.5)
    toy = system(SERVER, tmp_path)
    with running(toy):
        children = [int(file.name) for file in tmp_path.iterdir()]
        assert len(children) == 2
        assert all(map(is_alive, children))
        with pytest.raises(ServerError, match="already"), running(toy):
            pass
    assert not any(map(is_alive, children))


def test_one_that_is_up_already_is_left_alone() -> None:
    with running(System("toy", "http://127.0.0.1:1")):
        pass


def test_one_that_ends_is_told_with_its_last_words() -> None:
    with (
        pytest.raises(ServerError, match=r"status 3.*\n.*no memory"),
        running(system("print('no memory'); raise SystemExit(3)")),
    ):
        pass


@pytest.mark.slow
def test_one_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    script = "import os, pathlib, sys, time; pathlib.Path(sys.argv[2], str(os.getpid())).touch(); time.sleep(60)"
    with pytest.raises(ServerError, match="not ready after 1 seconds"), running(system(script, tmp_path), 1.0):
        pass
    (file,) = tmp_path.iterdir()
    assert int(file.name) != os.getpid()
    assert not is_alive(int(file.name))


def test_a_command_that_does_not_exist_is_told() -> None:
    with (
        pytest.raises(ServerError, match="cannot be started"),
        running(System("toy", "http://127.0.0.1:1", ("/nowhere/serve",))),
    ):
        pass
