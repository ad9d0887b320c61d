"""Matrices of bitsandbytes, which this file packs as the library's layers do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.models.formats import find_format
from paceline.models.loader import load_model
from tests.models.formats.stored import decoded, store
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The numbers of NF4's codes, from the QLoRA paper."""


STATE = "weight.quant_state.bitsandbytes__nf4"
"""End of the name of the tensor with what the library notes of a matrix."""


def config_of(bits: int = 4, kind: str = "nf4", **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_quant_storage": "uint8",
        **fields,
    }


def pack(weight: Tensor, nested: bool = True, **state: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a matrix to NF4 in blocks of 64."""
    flat, numbers = weight.float().flatten(), torch.tensor(NF4)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales[:, None]).unsqueeze(2).sub(numbers).abs().argmin(2).flatten()[: len(flat)]
    pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2).to(torch.uint8)
    notes = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape), **state}
    parts = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
        "weight.quant_map": numbers,
        "weight.absmax": scales,
    }
    if nested:
        nested_map, offset = torch.linspace(-1, 1, 256), scales.mean().item()
        groups = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        largest = groups.abs().amax(1)
        places = (groups / largest[:, None]).unsqueeze(2).sub(nested_map).abs().argmin(2).flatten()[: len(scales)]
        parts |= {
            "weight.absmax": places.to(torch.uint8),
            "weight.nested_absmax": largest,
            "weight.nested_quant_map": nested_map,
        }
        notes |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        scales = nested_map[places] * largest.repeat_interleave(256)[: len(scales)] + offset
    whole = numbers[codes] * scales.repeat_interleave(64)[: len(flat)]
    parts[STATE] = torch.tensor(list(json.dumps(notes).encode()), dtype=torch.uint8)
    return parts, whole.view(weight.shape)


def pack_bytes(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    """Quantize the rows of a matrix to 8 bits."""
    largest = weight.float().abs().amax(1)
    values = (weight / largest[:, None] * 127).round().char()
    parts = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, values * (largest[:, None] * 7.874015718698502e-3)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(80, 256), (3, 97), (2, 100)])
def test_each_weight_of_4_bits_is_a_number_of_the_map_times_the_scale_of_its_block(
    nested: bool, shape: tuple[int, int]
) -> None:
    tensors, expected = pack(torch.randn(shape, generator=torch.Generator().manual_seed(3)), nested)
    assert torch.equal(decoded(config_of(), tensors, shape), expected)


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_codes_may_be_stored_as_elements_of_other_dtypes(storage: str) -> None:
    tensors, expected = pack(torch.randn(8, 64))
    tensors["weight"] = tensors["weight"].flatten().view(getattr(torch, storage))[:, None]
    config = config_of(bnb_4bit_quant_storage=storage)
    assert torch.equal(decoded(config, tensors, (8, 64)), expected)


@pytest.mark.parametrize(("dtype", "rounded"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_weights_are_rounded_to_the_dtype_that_was_quantized(dtype: str, rounded: torch.dtype) -> None:
    tensors, expected = pack(torch.randn(8, 64), dtype=dtype)
    assert torch.equal(decoded(config_of(), tensors, (8, 64)), expected.to(rounded).float())


def test_each_weight_of_8_bits_is_a_code_times_the_scale_of_its_row() -> None:
    tensors, expected = pack_bytes(torch.randn(48, 96))
    layout = {"weight_format": tensors["weight_format"].view(1)}
    assert torch.equal(decoded(config_of(8), {**tensors, **layout}, (48, 96)), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, bits: int, quantization: Any
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    store(tmp_path, reference, config_of(bits), lambda _, weight: pack(weight) if bits == 4 else pack_bytes(weight))
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization=quantization)
    check_against_reference(reference, model, paged_contexts)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bnb_4bit_quant_type": "int3"}, "of the kind int3; supported are nf4 and fp4"),
        ({"bnb_4bit_quant_storage": "float8"}, "stored as float8; supported are uint8"),
        ({"load_in_4bit": False}, "with neither 4 nor 8 bits"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        find_format({"quantization_config": config_of(**changes)})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({STATE: torch.tensor([123], dtype=torch.uint8)}, "not an object in JSON"),
        ({STATE: torch.full((100_000,), ord("["), dtype=torch.uint8)}, "not an object in JSON"),
        ({"weight.absmax": torch.zeros(3)}, "has 3 scales for blocks of 64 weights"),
        ({"weight.absmax": torch.zeros(8, dtype=torch.uint8)}, "lacks the scales of its scales"),
    ],
)
def test_tensors_that_contradict_each_other_are_named(changes: dict[str, Tensor], named: str) -> None:
    tensors, _ = pack(torch.randn(8, 64), nested=False)
    with pytest.raises(ModelError, match=named):
        decoded(config_of(), {**tensors, **changes}, (8, 64))


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"shape": [4, 128]}, r"shape \[4, 128\] instead of \[8, 64\]"),
        ({"shape": 512}, r"shape 512 instead of \[8, 64\]"),
        ({"blocksize": 0}, "for blocks of 0 weights"),
        ({"blocksize": 10**15}, f"has 8 scales for blocks of {10**15} weights"),
    ],
)
def test_a_state_of_another_matrix_is_named(state: dict[str, Any], named: str) -> None:
    tensors, _ = pack(torch.randn(8, 64), **state)
    with pytest.raises(ModelError, match=named):
        decoded(config_of(), tensors, (8, 64))


def test_a_block_may_be_larger_than_its_matrix() -> None:
    tensors, expected = pack(torch.randn(8, 8), nested=False, blocksize=10**15)
    assert torch.equal(decoded(config_of(), tensors, (8, 8)), expected)


def test_8_bits_in_the_layout_of_an_old_gpu_are_refused() -> None:
    tensors, _ = pack_bytes(torch.randn(8, 64))
    with pytest.raises(ModelError, match="in a layout for one kind of GPU"):
        decoded(config_of(8), {**tensors, "weight_format": torch.tensor([2], dtype=torch.uint8)}, (8, 64))
