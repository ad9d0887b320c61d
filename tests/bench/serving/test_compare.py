from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SERVER = """\
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(b'{"data": [{"id": "toy"}]}')

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        events = [{"choices": [{"text": "x"}]}, {"choices": [{"text": "x"}]}, {"choices": [], "usage": usage}]
        lines = [*map(json.dumps, events), "[DONE]"]
        self.answer("".join(f"data: {line}\\n\\n" for line in lines).encode())

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


COMPARE = (sys.executable, "-m", "bench.serving.compare", "--workload=one", "--seed=1")


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMPARE, *arguments], capture_output=True, text=True, timeout=60, check=False)


def systems(folder: Path, source: str = SERVER) -> tuple[int, list[str]]:
    """Return a port, and the arguments for two systems that use it in turns."""
    script = folder / "server.py"
    script.write_text(source)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    names = [f"{name}=http://127.0.0.1:{port}" for name in ("ours", "theirs")]
    return port, [*names, *(f"--start={name}={sys.executable} {script} {port}" for name in ("ours", "theirs"))]


@pytest.mark.slow
def test_each_system_is_up_in_its_own_turns_only(tmp_path: Path) -> None:
    out = tmp_path / "compare.json"
    _, arguments = systems(tmp_path)
    done = compare(*arguments, "--rounds=2", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert "ours / theirs" in done.stdout
    rounds = json.loads(out.read_text())["rounds"]
    assert [one["one"]["all"]["requests"] for own in rounds.values() for one in own] == [4] * 4


@pytest.mark.slow
def test_what_cannot_be_measured_is_told() -> None:
    done = compare("a=http://127.0.0.1:9", "b=http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not answer" in done.stderr


@pytest.mark.slow
def test_what_was_started_ends_with_a_comparison_that_is_told_to_end(tmp_path: Path) -> None:
    hangs = SERVER.replace("def do_POST(self):", "def do_POST(self):\n        import time; print(time.sleep(60))")
    port, arguments = systems(tmp_path, hangs)
    with subprocess.Popen([*COMPARE, *arguments], stderr=subprocess.PIPE) as process:
        give_up = time.monotonic() + 30
        while not answers(port) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert answers(port)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not answers(port)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
