"""The release is one wheel for all supported versions of Python, and needs no compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def wheel() -> Path:
    (wheel,) = (ROOT / "dist").glob("paceline-*.whl")
    return wheel


def test_the_wheel_fits_every_python_and_holds_one_library(wheel: Path) -> None:
    assert re.search(r"-cp311-abi3-manylinux_2_\d+_\w+\.manylinux|-cp311-abi3-manylinux_2_\d+_\w+\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if ".so" in name] == ["paceline/kernels/native/_library.abi3.so"]
    assert "paceline/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]


def test_the_wheel_serves_a_model_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": str(venv / "bin"), "PACELINE_CACHE": str(tmp_path / "cache")}
    install: list[str | Path] = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    subprocess.run(
        [*install, "-c", ROOT / "requirements.lock", f"{wheel}[serve]"], check=True, env=environment, timeout=1200
    )
    with subprocess.Popen(
        [venv / "bin/paceline", "serve", "--port", "0", "--kernels", "native"],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as stack:
        try:
            assert answered_tokens(stack) == 4
        finally:
            stack.terminate()
    assert stack.returncode == 0


def answered_tokens(stack: subprocess.Popen[str]) -> int:
    """Wait until a stack is ready, ask it for four tokens, and return how many came."""
    assert stack.stdout is not None
    output = ""
    for line in stack.stdout:  # the loop ends when the process ends
        output += line
        if "Ctrl-C stops" in line:
            break
    found = re.search(r"curl (http://\S+)/v1/", output)
    assert found, output
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{found[1]}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(json.load(response)["usage"]["completion_tokens"])
