"""Checkpoints of `quant_method` fp8, compared with the dequantization of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.models.formats import find_format
from paceline.models.loader import load_model
from tests.models.formats.stored import decoded, store
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")
CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 32]}


def pack(weight: Tensor, block: tuple[int, int] | None = (16, 32)) -> tuple[Mapping[str, Tensor], Tensor]:
    """Quantize a matrix. The library dequantizes blocks only if they divide the matrix."""
    height, width = block or weight.shape
    blocks = weight.float().unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    if block is None:
        scales = scales.flatten()
    library = Fp8Dequantize(SimpleNamespace())
    whole = library._dequantize_one(values, scales.view(1, 1) if block is None else scales, torch.float32)
    return {"weight": values, "weight_scale_inv" if block else "weight_scale": scales}, whole


@pytest.mark.parametrize("block", [(16, 32), None])
def test_each_weight_is_that_of_transformers(block: tuple[int, int] | None) -> None:
    tensors, expected = pack(torch.randn(48, 96), block)
    config = {**CONFIG, "weight_block_size": block and list(block)}
    assert torch.equal(decoded(config, tensors, (48, 96)), expected)


def test_blocks_at_the_border_may_be_cut() -> None:
    tensors, expected = pack(torch.randn(48, 96))
    cut = {"weight": tensors["weight"][:40, :70], "weight_scale_inv": tensors["weight_scale_inv"]}
    assert torch.equal(decoded(CONFIG, cut, (40, 70)), expected[:40, :70])


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, quantization: Any
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    store(tmp_path, reference, CONFIG, lambda _, weight: pack(weight))
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization=quantization)
    check_against_reference(reference, model, paged_contexts)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fmt": "e5m2"}, "of the kind e5m2; only e4m3 is supported"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\], not two sizes"),
        ({"weight_block_size": [0, 128]}, "not two sizes"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        find_format({"quantization_config": {**CONFIG, **changes}})


@pytest.mark.parametrize("dimensions", [0, 1])
def test_one_scale_for_a_matrix_may_have_no_dimension(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, dimensions: int
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)

    def packed(_: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        tensors, whole = pack(weight, None)
        return {
            name: each.view((1,) * dimensions) if each.numel() == 1 else each for name, each in tensors.items()
        }, whole

    store(tmp_path, reference, {"quant_method": "fp8"}, packed)
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU)
    check_against_reference(reference, model, paged_contexts)
