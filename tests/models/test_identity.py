"""Two models have the same identity only if every byte of every file that a worker computes with is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ModelError
from paceline.models.files.content import read_content
from paceline.models.files.gguf_reference import GgufReference, PlacedMatrix
from paceline.models.identity import model_identity

SIZE = 300_000
CODE = "transformers 5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with all files that a worker may read, and some that it never reads."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    for name in ["config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"]:
        (folder / name).write_text("{}")
    for name in ["generation_config.json", "adapter_config.json", "modeling.py", "parts/deep/layer.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("x")
    return folder


def change(path: Path, place: int = 0) -> Callable[[], None]:
    """Change one byte in place, and keep the size and the time. Return a function that changes it back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return lambda: change(path, place) and None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(place=st.integers(0, SIZE - 1))
def test_each_byte_of_the_weights_counts(folder: Path, place: int) -> None:
    before = model_identity(folder, "bfloat16")
    undo = change(folder / "model.safetensors", place)
    other = model_identity(folder, "bfloat16")
    undo()
    assert (other.digest, other.weights) != (before.digest, before.weights)
    assert other.digest != before.digest
    assert other.weights != before.weights
    assert model_identity(folder, "bfloat16") == before


@pytest.mark.parametrize("code", ["native", CODE])
def test_each_file_that_a_worker_reads_counts(folder: Path, code: str) -> None:
    before = model_identity(folder, "bfloat16", code=code)
    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            undo = change(path)
            if model_identity(folder, "bfloat16", code=code).digest != before.digest:
                found.add(path.relative_to(folder).as_posix())
            undo()
    read = {"config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"}
    read |= {"model.safetensors"}
    foreign = {"modeling.py", "parts/deep/layer.py", "generation_config.json", "adapter_config.json"}
    assert found == (read if code == "native" else read | foreign)


def test_a_gguf_file_counts_and_may_not_be_replaced(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    file.write_bytes(b"GGUF")
    (folder / "weights.gguf").symlink_to(file)
    digest = read_content({"weights.gguf": file}).files[0].digest
    GgufReference({"weights.gguf": digest}, {}, {}).write(folder)
    identity = model_identity(folder, "bfloat16")
    assert dict(identity.parts)["weights.gguf"] == digest
    one = PlacedMatrix("Q8_0", (1, 32), ((0, 0),), 34)
    GgufReference({"weights.gguf": digest}, {"head": one}, {}).write(folder)
    assert model_identity(folder, "bfloat16").digest != identity.digest
    assert model_identity(folder, "bfloat16").weights != identity.weights
    change(file)
    with pytest.raises(ModelError, match=r"model\.gguf is not the GGUF file from which .*folder was converted; give"):
        model_identity(folder, "bfloat16")
    file.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf is missing, and .*folder has no copy of its weights; put the"):
        model_identity(folder, "bfloat16")


def test_a_part_that_differs_has_a_name(folder: Path) -> None:
    before = dict(model_identity(folder, "bfloat16").parts)
    undo = change(folder / "model.safetensors")
    now = dict(model_identity(folder, "float32", "int8").parts)
    undo()
    assert {name for name in before if before[name] != now[name]} == {"dtype", "quantization", "model.safetensors"}


def test_another_version_of_the_code_is_another_model(folder: Path) -> None:
    one, other = (model_identity(folder, "bfloat16", code=f"transformers {version}").digest for version in "56")
    assert one != other


def test_weights_are_the_same_whatever_computes_them(folder: Path) -> None:
    own = {model_identity(folder, dtype, how, code).weights for dtype, how, code in (
        ("bfloat16", "none", "native"), ("float32", "int8", "native"), ("bfloat16", "gguf", CODE),
    )}  # fmt: skip
    assert len(own) == 1


def test_the_name_of_the_folder_does_not_count(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert model_identity(tmp_path / "link", "bfloat16").digest == model_identity(folder, "bfloat16").digest


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        model_identity(tmp_path, "bfloat16")
