"""Matrices of ModelOpt: FP8 with one scale, and NVFP4."""

from __future__ import annotations

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
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the codes of E2M1, as the specification of OCP lists them."""


def config_of(algorithm: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **fields}


def pack_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max().float() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, values.float() * scale


def pack_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.float().unflatten(1, (-1, 16))
    whole = weight.abs().max().float() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    factors = scales.float() * whole
    codes = (groups / factors[:, :, None]).unsqueeze(3).sub(NUMBERS).abs().argmin(3).flatten(1)
    pairs = codes.view(len(codes), -1, 2).to(torch.uint8)
    parts = {"weight": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": scales, "weight_scale_2": whole}
    return parts, (NUMBERS[codes].unflatten(1, (-1, 16)) * factors[:, :, None]).flatten(1)


@pytest.mark.parametrize(("algorithm", "pack"), [("FP8", pack_fp8), ("NVFP4", pack_nvfp4)])
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, algorithm: str, pack: Any, quantization: Any
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    store(tmp_path, reference, config_of(algorithm), lambda _, weight: pack(weight))
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization=quantization)
    check_against_reference(reference, model, paged_contexts)


@pytest.mark.parametrize(("algorithm", "pack"), [("FP8", pack_fp8), ("NVFP4", pack_nvfp4)])
def test_each_weight_is_a_number_times_its_scales(algorithm: str, pack: Any) -> None:
    tensors, expected = pack(torch.randn(48, 96, generator=torch.Generator().manual_seed(3)))
    named = {name: tensor.view(1) if tensor.dim() == 0 else tensor for name, tensor in tensors.items()}
    assert torch.equal(decoded(config_of(algorithm), named, (48, 96)), expected)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (config_of("W4A8_AWQ"), "with the algorithm W4A8_AWQ; supported are FP8 and NVFP4"),
        (config_of(""), "with the algorithm None"),
        (config_of("NVFP4", group_size=32), "in groups that do not have 16 values"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        find_format({"quantization_config": config})
