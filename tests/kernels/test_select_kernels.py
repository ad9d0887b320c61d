from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import kernels as backends
from paceline.core.errors import ConfigError
from paceline.kernels import instruction_set_of, select_kernels
from paceline.kernels.interface import Kernels
from paceline.kernels.native.library import FILE_NAME, instruction_sets, load_library

pytestmark = pytest.mark.slow


def test_auto_finds_a_backend_for_the_cpu() -> None:
    kernels = select_kernels(torch.device("cpu"))
    assert kernels.linear(torch.ones(1, 2), kernels.pack(torch.ones(3, 2))).tolist() == [[2.0, 2.0, 2.0]]


def test_a_backend_is_chosen_by_name() -> None:
    assert select_kernels(torch.device("cpu"), "reference").name == "reference"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'cudnn'; known are: auto, reference, native, triton, triton-invariant"):
        select_kernels(torch.device("cpu"), "cudnn")


# A process decides only once whether to use Triton's interpreter, and other tests of this process may have chosen it.


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
    assert "ConfigError: the triton kernels need the packages of `pip install 'paceline[gpu]'`" in output


def test_auto_is_native_on_cpu_where_it_is_compiled() -> None:
    assert select_kernels(torch.device("cpu")).name == "native"


def test_without_a_compiled_library_auto_runs_on_torch_and_says_how_to_get_the_fast_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def missing(device: torch.device) -> Kernels:
        load_library(tmp_path)
        raise AssertionError("there is no library in an empty folder")

    monkeypatch.setitem(backends._BACKENDS, "native", missing)  # type: ignore[arg-type]
    assert select_kernels(torch.device("cpu")).name == "reference"
    assert "install a C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match="not compiled"):
        select_kernels(torch.device("cpu"), "native")


def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    file.write_bytes(b"no library")
    with pytest.raises(ConfigError, match=f"cannot be loaded: .*{re.escape(file.name)}"):
        load_library(tmp_path)


def test_native_refuses_other_devices_dtypes_and_instruction_sets() -> None:
    with pytest.raises(ConfigError, match="run on cpu, not on meta"):
        select_kernels(torch.device("meta"), "native")
    with pytest.raises(ConfigError, match="bfloat16 and float32"):
        select_kernels(torch.device("cpu"), "native").pack(torch.zeros(2, 2, dtype=torch.float16))
    with pytest.raises(ConfigError, match="'sse9' does not run here; choose one of: auto, "):
        backends.NativeKernels(1, "sse9")


def test_the_environment_can_narrow_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for name in instruction_sets():
        monkeypatch.setenv("PACELINE_ISA", name)
        assert instruction_set_of(select_kernels(cpu), cpu) == name
    assert instruction_set_of(select_kernels(cpu, "reference"), cpu).startswith("reference ")
    monkeypatch.setenv("PACELINE_ISA", "sse9")
    with pytest.raises(ConfigError, match="'sse9' does not run here; choose one of: auto, "):
        select_kernels(cpu, "native")


def test_operands_that_do_not_fit_are_refused() -> None:
    native = select_kernels(torch.device("cpu"), "native")
    weight = native.pack(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"x is \[1, 4\] torch.float32; the weight takes \[tokens, 2\]"):
        native.linear(torch.zeros(1, 4), weight)
    with pytest.raises(ValueError, match="bfloat16"):
        native.linear(torch.zeros(1, 2, dtype=torch.bfloat16), weight)


@pytest.mark.parametrize("layout", ["*op = 8, *step = 8, *kinds = 1;", None], ids=["another", "unknown"])
def test_a_library_from_another_source_is_not_used(tmp_path: Path, layout: str | None) -> None:
    body = f"void paceline_layout(long long *op, long long *step, long long *kinds) {{ {layout} }}" if layout else ""
    library = tmp_path / FILE_NAME
    compiler = ["g++", "-shared", "-fPIC", "-xc++", "-", "-o", str(library)]
    subprocess.run(compiler, input=f'extern "C" {{ {body} }}', text=True, timeout=60, check=True)
    with pytest.raises(ConfigError, match="another source; install a C"):
        load_library(tmp_path)
