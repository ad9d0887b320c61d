"""Packed weights, which are made once and shared by all processes of a host."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.core.errors import ModelError
from paceline.kernels.interface import Allocate, PackedWeight
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.kernels.quantized import QuantizedMatrix
from paceline.kernels.reference import ReferenceKernels
from paceline.models import checkpoint, packed_writing, quantized, read_ahead
from paceline.models.base import Model
from paceline.models.loader import load_model
from paceline.models.packed_writing import Output

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
TOKENS = 9


class Counting(NativeKernels):
    """Kernels that count the matrices that they had to pack."""

    def __init__(self, instruction_set: str = "auto") -> None:
        super().__init__(1, instruction_set)
        self._packed: list[tuple[int, ...]] = []  # several threads pack, and appending is atomic

    @property
    def packed(self) -> int:
        return len(self._packed)

    def pack(self, weight: torch.Tensor | QuantizedMatrix, allocate: Allocate | None = None) -> PackedWeight:
        if isinstance(weight, QuantizedMatrix) or not weight.is_meta:
            self._packed.append(weight.shape)
        return super().pack(weight, allocate)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def logits(model: Model, paged_contexts: Any, dtype: torch.dtype) -> torch.Tensor:
    logits: torch.Tensor = paged_contexts(model, 1, TOKENS, dtype).step({0: [*range(3, 3 + TOKENS)]})[0]
    return logits


def packed_folders(packed_dir: Path) -> list[Path]:
    return sorted(packed_dir.glob("*.shards"))


def packed_file(packed_dir: Path) -> Path:
    """Return a file of the only folder."""
    (folder,) = packed_folders(packed_dir)
    return next(folder.iterdir())


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one thread pack, so that one file has all matrices."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_the_first_packs_and_all_compute_the_same(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, dtype: torch.dtype, tied: bool
) -> None:
    save_llama(tie_word_embeddings=tied)
    kernels = [Counting() for _ in range(3)]
    folders = (None, tmp_path / "packed", tmp_path / "packed")
    models = [load_model(tmp_path, dtype, own, CPU, folder) for own, folder in zip(kernels, folders)]
    assert [own.packed for own in kernels] == [kernels[0].packed, kernels[0].packed, 0]
    private, first, second = (logits(model, paged_contexts, dtype) for model in models)
    assert torch.equal(private, first)
    assert torch.equal(private, second)
    assert len(packed_folders(tmp_path / "packed")) == 1


def test_matrices_of_heads_are_shared_too(
    tmp_path: Path, save_deepseek_v2: Any, paged_contexts: Any, dtype: torch.dtype
) -> None:
    save_deepseek_v2(first_k_dense_replace=3)
    kernels = [Counting() for _ in range(3)]
    folders = (None, tmp_path / "packed", tmp_path / "packed")
    models = [load_model(tmp_path, dtype, own, CPU, folder) for own, folder in zip(kernels, folders)]
    assert [own.packed for own in kernels] == [kernels[0].packed, kernels[0].packed, 0]
    private, *shared = (logits(model, paged_contexts, dtype) for model in models)
    assert all(torch.equal(private, each) for each in shared)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_rounded_matrices_are_shared_too(
    tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, dtype: torch.dtype, family: str
) -> None:
    request.getfixturevalue(f"save_{family}")()
    packed, kernels = tmp_path / "packed", [Counting() for _ in range(3)]
    load_model(tmp_path, dtype, Counting(), CPU, packed)
    models = [
        load_model(tmp_path, dtype, own, CPU, folder, "int8") for own, folder in zip(kernels, (None, packed, packed))
    ]
    routers = kernels[2].packed
    assert [own.packed for own in kernels] == [kernels[0].packed, kernels[0].packed + routers, routers]
    assert routers < kernels[0].packed / 4
    private, *shared = (logits(model, paged_contexts, dtype) for model in models)
    assert all(torch.equal(private, each) for each in shared)
    assert len(packed_folders(packed)) == 2  # whole and rounded matrices have a file each


@pytest.mark.parametrize("family", ["qwen3_moe", "granite_moe"])
def test_experts_are_packed_once(
    tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, dtype: torch.dtype, family: str
) -> None:
    request.getfixturevalue(f"save_{family}")()
    kernels = [Counting() for _ in range(3)]
    folders = (None, tmp_path / "packed", tmp_path / "packed")
    models = [load_model(tmp_path, dtype, own, CPU, folder) for own, folder in zip(kernels, folders)]
    routers = sum(layer not in models[0].config.experts.dense_layers for layer in range(3))
    assert kernels[2].packed == routers  # the matrices of routers, which are never quantized, are in no file
    private, first, second = (logits(model, paged_contexts, dtype) for model in models)
    assert torch.equal(private, first)
    assert torch.equal(private, second)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are read from safetensors files."""
    names: list[str] = []

    class Recording:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._file: Any = safe_open(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            names.append(name)
            tensor: torch.Tensor = self._file.get_tensor(name)
            return tensor

    monkeypatch.setattr(checkpoint, "safe_open", Recording)
    monkeypatch.setattr(quantized, "safe_open", Recording)
    return names


def is_packed(name: str) -> bool:
    """Return whether a tensor is in packed files. Vectors and the matrices of routers are not."""
    unpacked = ("bias", "sinks", "router.weight", "router.layer.weight", "mlp.gate.weight")
    return "norm" not in name and not name.endswith(unpacked)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "qwen3_moe", "granite_moe", "gpt_oss"])
def test_later_starts_read_no_packed_matrix(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    request.getfixturevalue(f"save_{family}")()
    load_model(tmp_path, torch.float32, Counting(), CPU, tmp_path / "packed")
    assert any(is_packed(name) for name in read)
    read.clear()
    announced: list[object] = []
    monkeypatch.setattr(read_ahead, "_begin_reading", lambda *place: announced.append(place))
    load_model(tmp_path, torch.float32, Counting(), CPU, tmp_path / "packed")
    assert [name for name in read if is_packed(name)] == announced == []


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


def test_a_file_may_be_larger_than_memory(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, dtype: torch.dtype
) -> None:
    save_llama()
    packed = tmp_path / "packed"
    before = logits(load_model(tmp_path, dtype, Counting(), CPU, packed), paged_contexts, dtype)
    file = packed_file(packed)
    content = file.read_bytes()
    index = len(content) - 8 - int.from_bytes(content[-8:], "little")
    with file.open("r+b") as output:  # a hole before the index, which takes no place on the disk
        output.seek(index + 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        output.write(content[index:])
    after = logits(load_model(tmp_path, dtype, Counting(), CPU, packed), paged_contexts, dtype)
    assert torch.equal(before, after)


def test_instruction_sets_of_another_form_have_another_file(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, dtype: torch.dtype
) -> None:
    save_llama()
    packed = tmp_path / "packed"
    for name in instruction_sets():
        private, *shared = (
            logits(load_model(tmp_path, dtype, Counting(name), CPU, folder), paged_contexts, dtype)
            for folder in (None, packed, packed)
        )
        assert all(torch.equal(private, each) for each in shared)
    assert len(packed_folders(packed)) == len({Counting(name).packing for name in instruction_sets()})


def test_other_weights_have_another_file(tmp_path: Path, save_llama: Any, paged_contexts: Any) -> None:
    save_llama()
    packed = tmp_path / "packed"
    load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor + 0.5 for name, tensor in load_file(file).items()}, file)
    shared, private = (load_model(tmp_path, torch.float32, Counting(), CPU, folder) for folder in (packed, None))
    assert torch.equal(*(logits(model, paged_contexts, torch.float32) for model in (shared, private)))
    load_model(tmp_path, torch.bfloat16, Counting(), CPU, packed)
    assert len(packed_folders(packed)) == 3


def test_matrices_are_mapped_from_the_file(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    packed = tmp_path / "packed"
    model = load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    maps = Path("/proc/self/maps").read_text()
    assert str(packed_folders(packed)[0]) in maps
    assert str(tmp_path / "model.safetensors") not in maps
    del model


@pytest.mark.slow
def test_processes_that_start_together_pack_once(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    code = (
        "import sys, torch; from pathlib import Path; from tests.models.test_packed import Counting\n"
        "from paceline.models.loader import load_model\n"
        "kernels, folder = Counting(), Path(sys.argv[1])\n"
        "load_model(folder, torch.float32, kernels, torch.device('cpu'), folder / 'packed')\n"
        "print(kernels.packed > 0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    assert sorted(process.communicate(timeout=120)[0].strip() for process in started) == ["False", "True"]


def test_a_folder_that_cannot_be_written_leaves_each_its_own(
    tmp_path: Path, save_llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_llama()
    (tmp_path / "file").touch()
    kernels = Counting()
    load_model(tmp_path, torch.float32, kernels, CPU, tmp_path / "file" / "packed")
    assert kernels.packed > 0
    assert "packs weights into its own memory" in caplog.text


def test_a_file_of_a_folder_that_cannot_be_written_is_shared(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama()
    load_model(tmp_path, torch.float32, Counting(), CPU, tmp_path / "packed")

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refuse)  # a user who may do everything runs tests, too
    kernels = Counting()
    load_model(tmp_path, torch.float32, kernels, CPU, tmp_path / "packed")
    assert kernels.packed == 0


@pytest.mark.usefixtures("one_thread")
def test_a_damaged_file_is_named(tmp_path: Path, save_llama: Any, dtype: torch.dtype) -> None:
    save_llama()
    packed = tmp_path / "packed"
    load_model(tmp_path, dtype, Counting(), CPU, packed)
    file = packed_file(packed)
    content = file.read_bytes()
    length = int.from_bytes(content[-8:], "little")
    index = json.loads(content[-8 - length : -8])

    def with_index(changed: object) -> bytes:
        text = json.dumps(changed).encode()
        return content[: -8 - length] + text + len(text).to_bytes(8, "little")

    assert with_index(index) == content
    name, (start, end, layout) = next(iter(index.items()))
    places = [[start, end - 2, layout], [start, end], [start + 1, end, layout], ["a", end, layout], [start, end, 1]]
    contents = [content[:-100], b"", b"x" * 100, with_index({}), with_index([]), with_index({name: 1})]
    for damaged in contents + [with_index(index | {name: place}) for place in places]:
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=f"{file.parent.name} is damaged; remove it"):
            load_model(tmp_path, dtype, Counting(), CPU, packed)


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
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, write: int
) -> None:
    save_llama()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
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


def test_of_files_of_other_libraries_only_the_last_one_in_use_stays(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    packed = tmp_path / "packed"

    def start(library: int) -> None:
        kernels = Counting()
        kernels.packing = f"native-{library}"
        load_model(tmp_path, torch.float32, kernels, CPU, packed)

    start(0)
    start(1)
    for folder in packed_folders(packed):
        os.utime(folder, (0, 0))
    start(0)
    start(2)
    assert [folder.stem.rpartition("-")[2] for folder in packed_folders(packed)] == ["0", "2"]


def test_a_file_of_an_older_version_counts_as_a_form(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    packed = tmp_path / "packed"
    load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    (folder,) = packed_folders(packed)
    packed_writing.remove(folder)
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


def test_a_folder_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model.shards"
    folder.mkdir()

    def be_killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packed_writing.shutil, "rmtree", be_killed)
    with pytest.raises(KeyboardInterrupt):
        packed_writing.remove(folder)
    assert not folder.exists()


def test_large_matrices_do_not_wait_in_memory_together(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_writing, "_MOST_UNWRITTEN", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
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


def test_all_threads_pack(tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
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


def test_kernels_that_do_not_pack_share_the_checkpoint_itself(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    load_model(tmp_path, torch.float32, ReferenceKernels(), CPU, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_parts_of_a_matrix_are_packed_apart(
    tmp_path: Path, save_granite_hybrid: Any, paged_contexts: Any, dtype: torch.dtype
) -> None:
    save_granite_hybrid(mamba_proj_bias=True)
    kernels = [Counting() for _ in range(3)]
    models = [
        load_model(tmp_path, dtype, each, CPU, folder)
        for each, folder in zip(kernels, (None, tmp_path / "packed", tmp_path / "packed"))
    ]
    assert kernels[0].packed == kernels[1].packed > 0
    assert kernels[2].packed == 0
    first, *others = (logits(model, paged_contexts, dtype) for model in models)
    assert all(torch.equal(first, other) for other in others)
