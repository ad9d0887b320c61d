"""GGUF files whose tensors are damaged, overlap or do not fit the metadata are refused by the tensor's name."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from paceline.core.errors import ModelError
from paceline.models.gguf.convert import convert_gguf
from tests.models.gemma4_gguf import SIZES, write_gemma4_gguf
from tests.models.gguf.test_gguf_metadata import refusal
from tests.models.gguf_files import write_gguf
from tests.tiny_checkpoints import write_tiny

UINT32 = gguf.GGUFValueType.UINT32
Q8_0 = gguf.GGMLQuantizationType.Q8_0
NAN, INFINITY = struct.pack("<e", float("nan")), struct.pack("<e", float("inf"))


def tensor_of(file: Path, name: str) -> gguf.ReaderTensor:
    return next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name)


def overwrite(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as output:
        output.seek(place)
        output.write(content)


def move_norm(offset: int) -> Callable[[Path], None]:
    """Return a function that changes the offset from which a file's last norm is read."""

    def move(file: Path) -> None:
        field = tensor_of(file, "output_norm.weight").field
        overwrite(file, field.offset + sum(part.nbytes for part in field.parts[:-1]), struct.pack("<Q", offset))

    return move


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (move_norm(0), r"its tensors token_embd\.weight and output_norm\.weight overlap"),
        (move_norm(33), r"its tensor output_norm\.weight has the offset 33, which is not a multiple of 32"),
        (move_norm(1 << 40), r"its tensor output_norm\.weight ends at byte \d{13}, but the file has \d{5,6} bytes"),
        (cut_off, r"its tensor blk\.1\.\w+\.weight ends at byte \d+, but the file has \d+ bytes"),
    ],
    ids=["overlap", "not aligned", "past the end", "cut off"],
)
def test_a_place_that_no_tensor_can_have_is_refused(
    tmp_path: Path, save_llama: Any, damage: Callable[[Path], None], message: str
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=261, num_hidden_layers=2))
    damage(source)
    assert re.fullmatch(message, refusal(source, tmp_path / "out"))


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # infinity times 0
@pytest.mark.parametrize("number", [NAN, INFINITY], ids=["nan", "infinity"])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1", "F16"])
def test_numbers_that_are_not_finite_are_refused(
    tmp_path: Path, save_llama: Any, type_name: str, number: bytes
) -> None:
    reference = save_llama(vocab_size=261, hidden_size=64, intermediate_size=96, num_key_value_heads=2,
                           num_attention_heads=4)  # fmt: skip
    source = write_gguf(tmp_path / "tiny.gguf", reference, quantized=gguf.GGMLQuantizationType[type_name])
    (tmp_path / "out").mkdir()
    overwrite(source, tensor_of(source, "blk.1.ffn_up.weight").data_offset, number)
    assert refusal(source, tmp_path / "out") == "its tensor blk.1.ffn_up.weight has numbers that are NaN or infinite"


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.2.ffn_down_exps.weight", "blk.2.ffn_up_exps.weight"])
def test_numbers_of_gemma_4_are_checked_too(tmp_path: Path, name: str) -> None:
    reference = write_tiny(tmp_path, "gemma4_experts", **SIZES, moe_intermediate_size=32)
    source = write_gemma4_gguf(tmp_path / "source" / "tiny.gguf", reference, Q8_0, halves=True)
    overwrite(source, tensor_of(source, name).data_offset, b"\xff" * 4)  # NaN as fp16 and as fp32
    assert refusal(source, tmp_path / "out") == f"its tensor {name} has numbers that are NaN or infinite"


@pytest.mark.parametrize(
    ("key", "value", "tensor", "shape", "wanted"),
    [
        ("feed_forward_length", 100, "blk.0.ffn_gate.weight", [80, 48], [100, 48]),
        ("attention__head_count_kv", 3, "blk.0.attn_k.weight", [16, 48], [24, 48]),
        ("vocab_size", 300, "token_embd.weight", [261, 48], [300, 48]),
        # No machine has the memory for this model.
        ("embedding_length", 6 << 29, "token_embd.weight", [261, 48], [261, 6 << 29]),
    ],
)
def test_a_tensor_that_does_not_fit_the_metadata_is_named(
    tmp_path: Path, save_llama: Any, key: str, value: int, tensor: str, shape: list[int], wanted: list[int]
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=261), **{f"llama__{key}": (value, UINT32)})
    message = re.escape(f"its tensor {tensor} has the shape {shape}, but its metadata say {wanted}")
    with pytest.raises(ModelError, match=rf"^tiny\.gguf cannot be converted: {message}; use the model's Hugging Face"):
        convert_gguf(source, tmp_path / "out")


def test_the_number_of_experts_is_checked(tmp_path: Path, save_qwen3_moe: Any) -> None:
    reference = save_qwen3_moe(vocab_size=261, mlp_only_layers=[])
    source = write_gguf(tmp_path / "tiny.gguf", reference, "qwen3moe", "qwen2", qwen3moe__expert_count=(9, UINT32))
    message = r"blk\.0\.ffn_gate_exps\.weight has the shape \[8, 24, 48\], but its metadata say \[9, 24, 48\]"
    with pytest.raises(ModelError, match=message):
        convert_gguf(source, tmp_path / "out")
