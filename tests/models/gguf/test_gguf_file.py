"""A converted folder has no copy of the matrices of its GGUF file, which are read there with the right numbers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import ConfigError, ModelError
from paceline.models.files.gguf_reference import read_reference
from paceline.models.gguf.blocks import BLOCK_TYPES
from paceline.models.gguf.convert import convert_gguf
from paceline.models.gguf.file import GgufFile, read_whole
from paceline.models.gguf.types import WHOLE_TYPES
from paceline.models.packing.packed_writing import Writing
from paceline.models.sources import assets
from paceline.models.sources.assets import link_folder, resolve_model
from tests.models.gguf.test_gguf_blocks import UPPER_BYTES
from tests.models.gguf.test_gguf_metadata import refusal
from tests.models.gguf.test_gguf_tensors import overwrite, tensor_of
from tests.models.gguf_files import write_gguf
from tests.models.packed_models import packed_folders
from tests.models.packing.test_quantized_models import PROMPTS, load, logits

SIZES = {"vocab_size": 261, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
QUANTIZED = [name for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0") if name in BLOCK_TYPES]


def silent(sentence: str) -> None:
    """Report nothing."""


def write(tmp_path: Path, save_llama: Any, type_name: str = "Q8_0", **more: Any) -> tuple[Path, Any]:
    """Return a GGUF file of a tiny Llama, and the model in fp32."""
    reference = save_llama(num_attention_heads=4, num_key_value_heads=2, **SIZES)
    quantized = None if type_name == "F32" else gguf.GGMLQuantizationType[type_name]
    (tmp_path / "source").mkdir(exist_ok=True)
    return write_gguf(tmp_path / "source" / "tiny.gguf", reference, quantized=quantized, **more), reference


@pytest.mark.parametrize("type_name", [*QUANTIZED, *WHOLE_TYPES, "TQ2_0"])
def test_tensors_have_the_numbers_of_the_file(tmp_path: Path, save_llama: Any, type_name: str) -> None:
    source, reference = write(tmp_path, save_llama, type_name)
    convert_gguf(source, tmp_path / "out")
    found = read_whole(tmp_path / "out")
    assert found.keys() == reference.state_dict().keys()
    kind = gguf.GGMLQuantizationType[type_name]
    for name, tensor in reference.state_dict().items():
        exact = tensor
        if tensor.dim() > 1:  # rows are quantized one by one, so their order does not matter
            exact = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
        assert torch.equal(found[name], exact.bfloat16()), name


@pytest.mark.parametrize("type_name", ["Q8_0", "F16"])
def test_a_folder_has_no_copy_of_matrices(tmp_path: Path, save_llama: Any, type_name: str) -> None:
    source, _ = write(tmp_path, save_llama, type_name)
    source.chmod(0o600)
    convert_gguf(source, tmp_path / "out")
    assert all(tensor.dim() == 1 for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert [path.name for path in (tmp_path / "out").glob("*.gguf")] == ["weights.gguf"]
    assert (tmp_path / "out" / "weights.gguf").readlink() == source
    assert source.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["none", "gguf", "int8"])
def test_later_workers_do_not_read_the_file(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    source, _ = write(tmp_path, save_llama)
    convert_gguf(source, tmp_path / "out")
    packed = tmp_path / "packed"
    private, first = (logits(load(tmp_path / "out", how, packed_dir=own), paged_contexts) for own in (None, packed))
    monkeypatch.setattr("paceline.models.gguf.file._map", None)
    monkeypatch.setattr(Writing, "__call__", None)
    second = logits(load(tmp_path / "out", how, packed_dir=packed), paged_contexts)
    assert len(packed_folders(packed)) == 1
    for request in PROMPTS:
        assert torch.equal(private[request], first[request])
        assert torch.equal(private[request], second[request])


def test_another_file_in_its_place_is_an_error_and_not_another_model(tmp_path: Path, save_llama: Any) -> None:
    source, _ = write(tmp_path, save_llama)
    convert_gguf(source, tmp_path / "out")
    overwrite(source, tensor_of(source, "blk.0.ffn_up.weight").data_offset + 2, b"\x05")
    message = rf"{re.escape(str(source))} is not the GGUF file from which {tmp_path / 'out'} was converted"
    for how in ("none", "gguf"):
        with pytest.raises(ModelError, match=message):
            load(tmp_path / "out", how)
    source.unlink()
    with pytest.raises(ModelError, match=rf"{re.escape(str(source))} is missing"):
        load(tmp_path / "out", "gguf")


@pytest.mark.parametrize("how", ["native", "transformers"])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    source, _ = write(tmp_path, save_llama)
    convert_gguf(source, tmp_path / "out")
    place = tensor_of(source, "blk.0.ffn_up.weight").data_offset + 2
    original = GgufFile.read

    def read(file: GgufFile, name: str) -> torch.Tensor:
        overwrite(source, place, b"\x05")
        return original(file, name)

    monkeypatch.setattr(GgufFile, "read", read)
    with pytest.raises(ModelError, match="has changed since it was read; start again"):
        load(tmp_path / "out", "none", kernels="reference") if how == "native" else read_whole(tmp_path / "out")


@pytest.mark.slow
def test_types_without_kernels_become_bf16(tmp_path: Path, save_llama: Any) -> None:
    source, _ = write(tmp_path, save_llama, "TQ2_0")
    folder = resolve_model(str(source), tmp_path / "cache", silent)
    assert read_reference(folder).unpacked["model.layers.0.mlp.up_proj.weight"] == "TQ2_0"
    assert load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    load(folder, "none")
    message = r"--quantization gguf: model\.\S+weight has GGUF's type TQ2_0, whose blocks cannot stay packed; choose"
    with pytest.raises(ConfigError, match=message):
        load(folder, "gguf")
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(source), tmp_path / "cache", silent, "gguf")


@pytest.mark.parametrize(
    ("type_name", "place"), [(name, place) for name, places in UPPER_BYTES.items() for place in places]
)
@pytest.mark.parametrize("number", [0x7C, 0x7E, 0xFC], ids=["infinity", "nan", "minus infinity"])
def test_each_number_of_a_block_must_be_finite(
    tmp_path: Path, save_llama: Any, type_name: str, place: int, number: int
) -> None:
    source = write_blocks(tmp_path, save_llama, type_name)
    (tmp_path / "out").mkdir()
    tensor = tensor_of(source, "blk.0.ffn_down.weight")
    overwrite(source, tensor.data_offset + int(tensor.n_bytes) - BLOCK_TYPES[type_name].bytes + place, bytes([number]))
    assert refusal(source, tmp_path / "out") == "its tensor blk.0.ffn_down.weight has numbers that are NaN or infinite"


def write_blocks(tmp_path: Path, save_llama: Any, type_name: str) -> Path:
    """Return a GGUF file one of whose matrices has random blocks of a type."""
    reference = save_llama(num_attention_heads=4, num_key_value_heads=2, **SIZES)
    random = np.random.default_rng(1)

    def quantize(data: Any, kind: gguf.GGMLQuantizationType) -> Any:
        block = BLOCK_TYPES[type_name]
        raw = random.integers(0, 256, (len(data), data.shape[1] // block.elements, block.bytes), dtype=np.uint8)
        raw[..., UPPER_BYTES[type_name]] &= 0x3B
        return raw.reshape(len(data), -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.quants, "quantize", quantize)
        return write_gguf(tmp_path / "tiny.gguf", reference, quantized=gguf.GGMLQuantizationType[type_name])


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_blocks_of_every_type_give_the_bits_of_their_numbers(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, type_name: str
) -> None:
    source = write_blocks(tmp_path, save_llama, type_name)
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out")
    found, tensor = read_whole(tmp_path / "out"), tensor_of(source, "blk.0.ffn_down.weight")
    exact = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"], exact.bfloat16())


class TestParts:
    @pytest.fixture
    def first(self, tmp_path: Path, save_llama: Any) -> Path:
        """The first of three parts of a GGUF file."""
        source, _ = write(tmp_path, save_llama, most_tensors=5)
        assert len(list(source.parent.iterdir())) == 3
        return source

    @pytest.mark.slow
    def test_a_split_file_is_the_same_model(self, tmp_path: Path, save_llama: Any, first: Path) -> None:
        whole = resolve_model(str(write(tmp_path, save_llama)[0]), tmp_path / "cache", silent)
        folder = resolve_model(str(first), tmp_path / "cache", silent, "gguf")
        assert folder.name == "tiny"
        assert (folder / "config.json").read_text() == (whole / "config.json").read_text()
        assert (folder / "tokenizer.json").read_text() == (whole / "tokenizer.json").read_text()
        found, expected = read_whole(folder), read_whole(whole)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

    def test_a_missing_part_is_named(self, tmp_path: Path, first: Path) -> None:
        second = first.with_name("tiny-00002-of-00003.gguf")
        with pytest.raises(ModelError, match=r"^tiny-00002-of-00003\.gguf is not the first part .*; give tiny-00001"):
            resolve_model(str(second), tmp_path / "cache", silent)
        second.unlink()
        with pytest.raises(ModelError, match=r"^tiny-00002-of-00003\.gguf is missing beside .*; put all 3 parts"):
            resolve_model(str(first), tmp_path / "cache", silent)

    def test_a_part_without_its_name_is_refused(self, tmp_path: Path, first: Path) -> None:
        alone = first.rename(tmp_path / "alone.gguf")
        with pytest.raises(ModelError, match=r"it is part 1 of 3; put all parts beside it, with names that end in"):
            convert_gguf(alone, tmp_path / "out")

    def test_parts_of_other_files_are_noticed(self, tmp_path: Path, save_llama: Any, first: Path) -> None:
        third, second = (first.with_name(f"tiny-0000{number}-of-00003.gguf") for number in (3, 2))
        second.write_bytes(third.read_bytes())
        assert refusal(first, tmp_path / "out") == "tiny-00002-of-00003.gguf says that it is part 3 of 3"
        other = tmp_path / "other"
        other.mkdir()
        write(other, save_llama, most_tensors=6)
        second.write_bytes((other / "source" / "tiny-00002-of-00002.gguf").read_bytes())
        assert refusal(first, tmp_path / "out") == "tiny-00002-of-00003.gguf says that it is part 2 of 2"

    @pytest.mark.parametrize("total", [11, 13])
    def test_the_number_of_tensors_is_checked(self, tmp_path: Path, first: Path, total: int) -> None:
        field = gguf.GGUFReader(first).fields["split.tensors.count"]
        overwrite(first, field.offset + sum(part.nbytes for part in field.parts[:-1]), bytes([total, 0, 0, 0]))
        assert refusal(first, tmp_path / "out").endswith(f"says {total}, so one is of another file")

    def test_a_tensor_in_two_parts_is_refused(self, tmp_path: Path, first: Path) -> None:
        second, third = (first.with_name(f"tiny-0000{number}-of-00003.gguf") for number in (2, 3))
        field = gguf.GGUFReader(second).fields["split.no"]
        place = field.offset + sum(part.nbytes for part in field.parts[:-1])
        third.write_bytes(second.read_bytes())
        overwrite(third, place, b"\x02")
        assert re.fullmatch(r"its tensor \S+ is in two parts", refusal(first, tmp_path / "out"))


class TestPlaces:
    """A conversion follows its file."""

    @pytest.fixture
    def conversions(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the files that are converted."""
        names, original = [], assets.run_converter

        def convert(module: str, source: str, scratch: Path, name: str, report: Callable[[str], None]) -> None:
            names.append(name)
            original(module, source, scratch, name, report)

        monkeypatch.setattr(assets, "run_converter", convert)
        return names

    @pytest.mark.slow
    def test_a_file_that_was_moved_is_found_again(
        self, tmp_path: Path, save_llama: Any, conversions: list[str]
    ) -> None:
        source, _ = write(tmp_path, save_llama)
        folder = resolve_model(str(source), tmp_path / "cache", silent)
        moved = source.rename(tmp_path / "tiny.gguf")
        source.write_bytes(b"another model")
        assert resolve_model(str(moved), tmp_path / "cache", silent) == folder
        assert conversions == ["tiny.gguf"]
        assert (folder / "weights.gguf").resolve() == moved
        load(folder, "gguf")

    @pytest.mark.slow
    def test_a_copy_of_the_file_takes_nothing_from_a_running_stack(self, tmp_path: Path, save_llama: Any) -> None:
        source, _ = write(tmp_path, save_llama)
        folder = resolve_model(str(source), tmp_path / "cache", silent)
        (tmp_path / "other").mkdir()
        copy = Path(shutil.copy(source, tmp_path / "other" / "tiny.gguf"))
        assert resolve_model(str(copy), tmp_path / "cache", silent) == folder
        copy.unlink()
        load(folder, "gguf")

    @pytest.mark.slow
    def test_a_damaged_part_of_the_folder_is_made_again(self, tmp_path: Path, save_llama: Any) -> None:
        source, _ = write(tmp_path, save_llama)
        convert_gguf(source, tmp_path / "out")
        source.rename(tmp_path / "out" / "weights.gguf")
        overwrite(tmp_path / "out" / "weights.gguf", 4096, b"\x05\x06")
        with pytest.raises(
            ModelError, match=rf"weights\.gguf is damaged; remove {tmp_path / 'out'}, and the next start"
        ):
            load(tmp_path / "out", "gguf")

    @pytest.mark.slow
    def test_a_file_that_was_fetched_for_this_becomes_a_part_of_the_folder(
        self, tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, _ = write(tmp_path, save_llama)

        def fetch(bundled: object, scratch: Path, name: str, report: Callable[[str], None]) -> Path:
            return Path((scratch / name).write_bytes(source.read_bytes()) and scratch / name)

        monkeypatch.setattr(assets, "fetch_gguf", fetch)
        folder = resolve_model("smollm2-135m-instruct", tmp_path / "cache", silent)
        assert (folder / "weights.gguf").is_file()
        assert not (folder / "weights.gguf").is_symlink()
        assert load(folder, "gguf").config.num_layers == 1


def test_two_processes_may_make_the_same_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, original, others = tmp_path / "link", Path.replace, [tmp_path / "second"]
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()

    def replace(path: Path, target: Path) -> Path:
        if others:
            link_folder(others.pop(), link)
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    link_folder(tmp_path / "first", link)
    assert link.resolve() == tmp_path / "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "link", "second"]


def test_a_folder_that_may_not_be_entered_is_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelError, match=r"tiny\.gguf does not exist"):
        resolve_model(str(tmp_path / "private" / "tiny.gguf"), tmp_path / "cache", silent)
