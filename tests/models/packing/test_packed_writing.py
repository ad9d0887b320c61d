"""The writing of packed weights by several threads, and what is left of it if something fails."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.core.errors import ModelError
from paceline.kernels.native import NativeKernels
from paceline.kernels.packed_weight import Allocate, PackedWeight
from paceline.models.loader import load_model
from paceline.models.packing import packed_writing
from paceline.models.packing.packed_writing import Output
from tests.models.packed_models import CPU, Counting, logits, packed_folders

ROOT = Path(__file__).parents[3]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 100), max_size=20), piece=st.integers(1, 64), most=st.integers(1, 64))
def test_pieces_of_a_file_are_aligned(sizes: list[int], piece: int, most: int) -> None:
    class Raw:
        """A file that writes no more than `most` bytes at once."""

        def __init__(self) -> None:
            self.content = b""
            self.starts: list[int] = []

        def write(self, data: memoryview) -> int:
            self.starts.append(len(self.content))
            self.content += bytes(data[:most])
            return min(most, len(data))

    raw, whole = Raw(), b""
    output = Output(raw, piece)  # type: ignore[arg-type]
    for number, size in enumerate(sizes):
        output.write(bytes([number]) * size)
        whole += bytes([number]) * size
        assert output.tell() == len(whole)
    output.flush()
    assert raw.content == whole
    assert most < piece or all(start % piece == 0 for start in raw.starts)


def test_the_progress_is_told(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = save_llama()
    monkeypatch.setattr(packed_writing, "_TOLD_SECONDS", 0.0)
    with caplog.at_level("INFO", packed_writing.__name__):
        load_model(tmp_path, torch.bfloat16, Counting(), CPU, tmp_path / "packed")
    told = [record.args[0] for record in caplog.records if "packing the model's weights" in record.message]
    matrices = [weight for weight in reference.parameters() if weight.dim() > 1]
    assert len(told) == len(matrices)
    assert told[-1] == sum(weight.numel() for weight in matrices) / 1e9


@pytest.mark.slow
def test_processes_that_start_together_pack_once(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    code = (
        "import sys, torch; from pathlib import Path; from tests.models.packed_models import Counting\n"
        "from paceline.models.loader import load_model\n"
        "kernels, folder = Counting(), Path(sys.argv[1])\n"
        "load_model(folder, torch.float32, kernels, torch.device('cpu'), folder / 'packed')\n"
        "print(kernels.packed > 0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    assert sorted(process.communicate(timeout=120)[0].strip() for process in started) == ["False", "True"]


@pytest.mark.parametrize("matrix", [1, 4, 15])
def test_an_error_of_the_kernels_ends_the_load_and_leaves_no_file(tmp_path: Path, save_llama: Any, matrix: int) -> None:
    class Broken(Counting):
        def pack(self, *how: Any) -> PackedWeight:
            packed = super().pack(*how)
            if self.packed >= matrix:
                raise RuntimeError("these kernels are broken")
            return packed

    save_llama()
    with pytest.raises(RuntimeError, match="broken"):
        load_model(tmp_path, torch.float32, Broken(), CPU, tmp_path / "packed")
    assert not [*(tmp_path / "packed").glob("*.shards"), *(tmp_path / "packed").glob("*.tmp")]


@pytest.mark.parametrize("write", [1, 2, 7])
def test_if_the_disk_is_full_each_worker_packs_for_itself(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    save_llama()
    expected = logits(load_model(tmp_path, torch.float32, NativeKernels(1), CPU), paged_contexts, torch.float32)
    real, calls = Output.write, itertools.count(1)

    def fail(own: Output, data: bytes | memoryview) -> None:
        if next(calls) >= write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(own, data)

    monkeypatch.setattr(Output, "write", fail)
    model = load_model(tmp_path, torch.float32, NativeKernels(1), CPU, tmp_path / "packed")
    assert torch.equal(logits(model, paged_contexts, torch.float32), expected)
    assert not [*(tmp_path / "packed").glob("*.shards"), *(tmp_path / "packed").glob("*.tmp")]


@pytest.mark.parametrize("write", [0, 7])
def test_one_error_of_one_thread_ends_the_writing(
    tmp_path: Path,
    save_llama: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    set_threads: Callable[[int], None],
    write: int,
) -> None:
    save_llama()
    set_threads(2)
    real, calls = Output.write, itertools.count()

    def fail_once(own: Output, data: bytes | memoryview) -> None:
        if next(calls) == write:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(own, data)

    monkeypatch.setattr(Output, "write", fail_once)
    load_model(tmp_path, torch.float32, NativeKernels(1), CPU, tmp_path / "packed")
    assert "packs weights into its own memory" in caplog.text
    assert [path for path in (tmp_path / "packed").iterdir() if path.suffix != ".lock"] == []


def test_a_model_that_does_not_fit_leaves_no_file(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match="missing tensors"):
        load_model(tmp_path, torch.float32, Counting(), CPU, tmp_path / "packed")
    assert [path.name for path in (tmp_path / "packed").iterdir() if not path.name.endswith(".lock")] == []


def test_a_file_of_an_older_version_counts_as_a_form(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    packed = tmp_path / "packed"
    load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    (folder,) = packed_folders(packed)
    shutil.rmtree(folder)
    for number in range(2):  # the later one is kept
        old = folder.with_name(f"{folder.stem}-{number}.packed")
        old.write_bytes(b"packed by an older version")
        os.utime(old, (number, number))
    load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    assert sorted(path for path in packed.iterdir() if path.suffix != ".lock") == sorted([folder, old])


@pytest.mark.parametrize("left", ["own", "other"])
def test_what_a_killed_process_left_is_removed(tmp_path: Path, save_llama: Any, left: str) -> None:
    save_llama()
    packed = tmp_path / "packed"
    load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    (folder,) = packed_folders(packed)
    folder.rename((folder if left == "own" else folder.with_name(f"{folder.stem}-other.shards")).with_suffix(".tmp"))
    load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    assert [path for path in packed.iterdir() if path.is_dir()] == [folder]


def test_large_matrices_do_not_wait_in_memory_together(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch, set_threads: Callable[[int], None]
) -> None:
    monkeypatch.setattr(packed_writing, "_MOST_UNWRITTEN", 1)
    set_threads(3)
    at_work = threading.Semaphore(1)

    class Alone(Counting):
        def pack(self, weight: Any, allocate: Allocate | None = None) -> PackedWeight:
            if allocate is None:
                return super().pack(weight)
            assert at_work.acquire(blocking=False)
            packed = super().pack(weight, allocate)
            at_work.release()
            return packed

    save_llama()
    load_model(tmp_path, torch.float32, Alone(), CPU, tmp_path / "packed")
    assert len(packed_folders(tmp_path / "packed")) == 1


def test_all_threads_pack(tmp_path: Path, save_llama: Any, set_threads: Callable[[int], None]) -> None:
    set_threads(3)
    together, calls = threading.Barrier(3, timeout=60), itertools.count()

    class Meeting(Counting):
        def pack(self, weight: Any, allocate: Allocate | None = None) -> PackedWeight:
            if allocate is not None and next(calls) < 3:
                together.wait()
            return super().pack(weight, allocate)

    save_llama()
    load_model(tmp_path, torch.float32, Meeting(), CPU, tmp_path / "packed")
    (folder,) = packed_folders(tmp_path / "packed")
    assert sorted(file.name for file in folder.iterdir()) == ["0", "1", "2"]
