from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.kernels import select_kernels


def test_auto_finds_a_backend_for_the_cpu() -> None:
    kernels = select_kernels(torch.device("cpu"))
    assert kernels.linear(torch.ones(1, 2), kernels.pack(torch.ones(3, 2))).tolist() == [[2.0, 2.0, 2.0]]


def test_a_backend_is_chosen_by_name() -> None:
    assert select_kernels(torch.device("cpu"), "reference").name == "reference"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'cudnn'; known are: auto, reference, native, triton, triton-invariant"):
        select_kernels(torch.device("cpu"), "cudnn")


# Whether Triton's interpreter is used is decided once in a process, and tests may have decided for it.


def run(program: str) -> str:
    pytest.importorskip("triton", reason="the package triton is not installed")
    lines = ["import torch", "from paceline.kernels import select_kernels", program]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def test_auto_prefers_triton_on_a_gpu() -> None:
    assert run("print(select_kernels(torch.device('cuda')).name)") == "triton\n"


def test_triton_refuses_a_cpu_and_says_what_it_needs() -> None:
    output = run("select_kernels(torch.device('cpu'), 'triton')")
    assert "ConfigError: the triton kernels cannot run on cpu: they need a cuda device" in output


def test_without_the_package_triton_says_what_to_install() -> None:
    output = run("import sys; sys.modules['triton'] = None\nselect_kernels(torch.device('cuda'), 'triton')")
    assert "ConfigError: the triton kernels need what `pip install 'paceline[gpu]'` installs" in output
