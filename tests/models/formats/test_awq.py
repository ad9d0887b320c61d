"""Matrices of AutoAWQ, which this file packs as AutoAWQ's layers do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.models.loader import load_model
from tests.models.formats.stored import decoded, store
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")


def config_of(version: str = "gemm", group_size: int = 32) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": version, "zero_point": True}


def random_codes(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix [out, in] to codes with zeros and fp16 scales of groups: [out, in], twice [out, groups]."""
    size_out, size_in = weight.shape
    groups = weight.float().view(size_out, -1, group)
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round().clamp(0, 15).int()
    codes = (groups / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    return codes.clamp(0, 15).int().view(size_out, size_in), zeros, scales


def words(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack codes [rows, columns] into words [rows, columns / 8], whose code i is column order[i]."""
    eights = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).view(len(codes), -1, 8)
    packed = torch.zeros(eights.shape[:2], dtype=torch.int32)
    for place, column in enumerate(order):
        packed |= eights[..., column] << 4 * place
    return packed


def pack(version: str, group: int, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    codes, zeros, scales = random_codes(weight, group)
    spread = [numbers.repeat_interleave(group, 1) for numbers in (zeros, scales)]
    whole = (codes - spread[0]) * spread[1]
    assert whole.dtype == torch.float16
    if version == "gemm":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": words(codes.T, order), "qzeros": words(zeros.T, order), "scales": scales.T.contiguous()}
        return parts, whole
    packed_zeros = words(zeros, tuple(range(8)))
    multiple = {64: 2, 32: 4}.get(group, 1)
    wide = -(-packed_zeros.shape[1] // multiple) * multiple
    pad = torch.nn.functional.pad
    parts = {
        "qweight": words(codes, tuple(range(8))),
        "qzeros": pad(packed_zeros, (0, wide - packed_zeros.shape[1])),
        "scales": pad(scales, (0, wide * 8 - scales.shape[1])),
    }
    return parts, whole


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_each_weight_is_that_of_the_library(version: str, group: int) -> None:
    weight = torch.randn(80, 256, generator=torch.Generator().manual_seed(3))
    tensors, expected = pack(version, group, weight)
    assert torch.equal(decoded(config_of(version, group), tensors, (80, 256)), expected.float())


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, quantization: Any
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    store(tmp_path, reference, config_of(), lambda _, weight: pack("gemm", 32, weight))
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization=quantization)
    check_against_reference(reference, model, paged_contexts)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 3}, "in 3 bits; only 4 are supported"),
        ({"bits": "four"}, "bits is 'four', not a whole number"),
        ({"version": "marlin"}, "the layout marlin; gemm and gemv are supported"),
        ({"group_size": 24}, "in groups of 24"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        decoded({**config_of(), **changes}, {}, (32, 96))
