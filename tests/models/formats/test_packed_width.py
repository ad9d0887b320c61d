"""Small numbers of every format keep their own width in the native kernels, and stand for the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.models.checkpoint import Checkpoint
from paceline.models.formats import find_format
from paceline.models.packing.quantized import Packer
from tests.models.formats import test_bitsandbytes, test_fp8, test_modelopt

CPU, SHAPE = torch.device("cpu"), (48, 256)
HEAD_BYTES = 192
Case = tuple[dict[str, Any], Callable[[Tensor], Mapping[str, Tensor]], int, int]


def compressed_tensors(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": kind, "weights": {"type": "float", **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group": group}}


def codes_of(weight: Tensor) -> Tensor:
    """Return a byte for each two codes of random numbers."""
    return torch.randint(0, 256, (len(weight), weight.shape[1] // 2), dtype=torch.uint8)


def pack_mxfp4(weight: Tensor) -> Mapping[str, Tensor]:
    scales = torch.randint(100, 150, (len(weight), weight.shape[1] // 32), dtype=torch.uint8)
    return {"weight_packed": codes_of(weight), "weight_scale": scales}


def pack_nvfp4(weight: Tensor) -> Mapping[str, Tensor]:
    scales = (torch.rand(len(weight), weight.shape[1] // 16) * 448).to(torch.float8_e4m3fn)
    whole = torch.tensor([37.19])
    return {"weight_packed": codes_of(weight), "weight_scale": scales, "weight_global_scale": whole}


def pack_mxfp8(weight: Tensor) -> Mapping[str, Tensor]:
    scales = torch.randint(100, 150, (len(weight), weight.shape[1] // 32), dtype=torch.uint8)
    return {"weight": (weight * 50).to(torch.float8_e4m3fn), "weight_scale": scales}


def pack_channels(weight: Tensor) -> Mapping[str, Tensor]:
    scales = torch.rand(len(weight), 1).bfloat16()
    return {"weight": (weight * 50).to(torch.float8_e4m3fn), "weight_scale": scales}


# A config, a function that quantizes a matrix, the bits of 128 weights of an output, and the bytes before them.
FORMATS: dict[str, Case] = {
    "MXFP4": (
        compressed_tensors("mxfp4", num_bits=4, strategy="group", group_size=32),
        pack_mxfp4,
        128 * 4 + 4 * 8,
        HEAD_BYTES,
    ),
    "NVFP4": (
        compressed_tensors("nvfp4", num_bits=4, strategy="tensor_group", group_size=16),
        pack_nvfp4,
        128 * 4 + 8 * 8,
        HEAD_BYTES,
    ),
    "NVFP4 of ModelOpt": (
        test_modelopt.config_of("NVFP4"),
        lambda weight: test_modelopt.pack_nvfp4(weight)[0],
        128 * 4 + 8 * 8,
        HEAD_BYTES,
    ),
    "NF4": (
        test_bitsandbytes.config_of(),
        lambda weight: test_bitsandbytes.pack(weight, dtype="bfloat16")[0],
        128 * 4 + 2 * 32,
        HEAD_BYTES,
    ),
    "FP8 in blocks": (
        {**test_fp8.CONFIG, "weight_block_size": [16, 128]},
        lambda weight: test_fp8.pack(weight, (16, 128))[0],
        128 * 8 + 32,
        0,
    ),
    "FP8": (
        {**test_fp8.CONFIG, "weight_block_size": None},
        lambda weight: test_fp8.pack(weight, None)[0],
        128 * 8 + 32,
        0,
    ),
    "FP8 of ModelOpt": (
        test_modelopt.config_of("FP8"),
        lambda weight: test_modelopt.pack_fp8(weight)[0],
        128 * 8 + 32,
        0,
    ),
    "FP8 by channel": (compressed_tensors("float", num_bits=8, strategy="channel"), pack_channels, 128 * 8 + 32, 0),
    "MXFP8": (
        compressed_tensors("mxfp8", num_bits=8, strategy="group", group_size=32),
        pack_mxfp8,
        128 * 8 + 4 * 8,
        0,
    ),
}


@pytest.fixture(scope="module", params=instruction_sets())
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(1, request.param)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_keep_their_width_and_every_bit_of_their_numbers(
    tmp_path: Path, native: NativeKernels, name: str
) -> None:
    torch.manual_seed(5)
    config, pack, bits_of_128, head = FORMATS[name]
    tensors = pack(torch.randn(SHAPE))
    save_file({f"m.{part}": tensor.contiguous() for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    order = [*range(16, 48), *range(16)]

    def take(form: Any, dtype: torch.dtype) -> Any:
        stored = find_format({"quantization_config": config})
        packer = Packer(native, CPU, form)
        return Checkpoint([tmp_path / "model.safetensors"], dtype, CPU, packer, stored).take_packed(
            "m.weight", *SHAPE, order=order
        )

    ids = torch.arange(SHAPE[0])
    for dtype in (torch.float32, torch.bfloat16):
        kept, whole = take("checkpoint", dtype), take("none", dtype)
        assert kept.data.nbytes == head + SHAPE[0] * SHAPE[1] // 128 * bits_of_128 // 8
        assert torch.equal(native.embed(ids, kept), native.embed(ids, whole))
        assert kept.format is not None
        assert native.fits(kept)


def test_floats_that_are_nan_stay_nan(tmp_path: Path, native: NativeKernels) -> None:
    values = torch.ones(32, 64).to(torch.float8_e4m3fn)
    values[3, 5] = float("nan")
    save_file({"m.weight": values, "m.weight_scale": torch.tensor([2.0])}, tmp_path / "model.safetensors")
    stored = find_format({"quantization_config": {**test_fp8.CONFIG, "weight_block_size": None}})
    packer = Packer(native, CPU, "checkpoint")
    checkpoint = Checkpoint([tmp_path / "model.safetensors"], torch.float32, CPU, packer, stored)
    rows = native.embed(torch.tensor([3, 4]), checkpoint.take_packed("m.weight", 32, 64))
    assert rows.isnan().nonzero().tolist() == [[0, 5]]
