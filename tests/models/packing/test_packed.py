"""Packed weights, which are made once and shared by all processes of a host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.core.errors import ModelError
from paceline.kernels.native.library import instruction_sets
from paceline.kernels.reference import ReferenceKernels
from paceline.models import checkpoint
from paceline.models.files import read_ahead
from paceline.models.loader import load_model
from tests.models.packed_models import CPU, Counting, logits, packed_folders


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def packed_file(packed_dir: Path) -> Path:
    """Return a file of the only folder."""
    (folder,) = packed_folders(packed_dir)
    return next(folder.iterdir())


@pytest.fixture
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Let one thread pack, so that one file has all matrices."""
    set_threads(1)


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


def test_a_checkpoint_that_is_saved_again_in_place_is_packed_again(
    tmp_path: Path, save_llama: Any, paged_contexts: Any
) -> None:
    save_llama(tie_word_embeddings=True)
    file, packed = tmp_path / "model.safetensors", tmp_path / "packed"
    before = file.stat()
    load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][77, -1] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    shared, private = (load_model(tmp_path, torch.float32, Counting(), CPU, folder) for folder in (packed, None))
    assert torch.equal(*(logits(model, paged_contexts, torch.float32) for model in (shared, private)))
    assert len(packed_folders(packed)) == 2


def test_a_checkpoint_that_changes_while_it_is_packed_leaves_nothing(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    file, packed = tmp_path / "model.safetensors", tmp_path / "packed"

    class Saving(Counting):
        """Kernels beside which somebody saves the checkpoint again."""

        def pack(self, *arguments: Any) -> Any:
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"!")
            return super().pack(*arguments)

    with pytest.raises(ModelError, match=r"model\.safetensors has changed since it was read"):
        load_model(tmp_path, torch.float32, Saving(), CPU, packed)
    assert packed_folders(packed) == []


def test_matrices_are_mapped_from_the_file(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    packed = tmp_path / "packed"
    model = load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    maps = Path("/proc/self/maps").read_text()
    assert str(packed_folders(packed)[0]) in maps
    assert str(tmp_path / "model.safetensors") not in maps
    del model


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
