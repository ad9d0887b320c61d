"""A user's first contact: `paceline serve`, the request that it prints, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.stack, pytest.mark.model]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def stack() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "paceline", "serve", "--port=0", "--api-key=sesame"]
    process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), text=True, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def read_greeting(stack: subprocess.Popen[str]) -> str:
    assert stack.stdout is not None
    lines = iter(stack.stdout.readline, "")
    text = ""
    while "Ctrl-C stops" not in text:
        line = next(lines, None)
        assert line is not None, f"the stack did not start:\n{text}"
        text += line
    return text


def request_of(curl: str) -> urllib.request.Request:
    words = shlex.split(curl)
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    body = json.loads(words[words.index("-d") + 1])
    # Enough tokens that both fleets generate some, and few enough for a busy machine.
    body["max_tokens"] = 8
    return urllib.request.Request(words[1], json.dumps(body).encode(), headers)


def test_the_printed_request_is_answered_and_ctrl_c_leaves_nothing(stack: subprocess.Popen[str]) -> None:
    text = read_greeting(stack)
    children = [psutil.Process(int(pid)) for pid in re.findall(r"pid (\d+)", text)]
    assert "sesame" not in text
    assert re.search(r"^Ready\. Workers compute with [\w-]+ bfloat16\. Try it:$", text, re.MULTILINE)
    curl = text[text.index("curl") : text.index("Ctrl-C")].replace("YOUR_KEY", "sesame")
    with urllib.request.urlopen(request_of(curl), timeout=300) as reply:
        answer = json.load(reply)
    assert answer["model"] == "smollm2-135m-instruct"
    assert answer["choices"][0]["message"]["content"]
    stack.send_signal(signal.SIGINT)
    assert stack.wait(120) == 0
    assert not any(child.is_running() for child in children)
    (socket,) = re.findall(r"unix://(\S+)", text)
    assert not Path(socket).parent.exists()
