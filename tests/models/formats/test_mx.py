"""Checkpoints of GPT-OSS whose experts are in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.base import FusedExperts, Model
from paceline.models.checkpoint import Checkpoint
from paceline.models.folder import weight_files
from paceline.models.formats import find_format
from paceline.models.formats.mx import decode_mxfp4
from paceline.models.loader import load_model
from paceline.models.packing.quantized import Packer
from tests.models.formats.stored import whole
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")


def load(folder: Path, quantization: Any = "none", dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, dtype, select_kernels(CPU), CPU, quantization=quantization)


@pytest.mark.parametrize("size_in", [96, 70])
def test_every_code_and_every_scale_is_exact(size_in: int) -> None:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (2, 255, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.arange(1, 256, dtype=torch.uint8).clamp(max=253).view(1, 255, 1).expand(2, 255, 3).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales).mT[..., :size_in]
    for expert in range(2):
        codes = decode_mxfp4(blocks[expert].flatten(1), scales[expert], size_in)
        assert torch.equal(whole(codes), expected[expert].float())


@pytest.fixture
def save_mxfp4(tmp_path: Path, save_gpt_oss: Any) -> Any:
    """Save a tiny GPT-OSS with random experts in MXFP4 and return the `transformers` model with the same weights."""
    reference = save_gpt_oss(hidden_size=64, intermediate_size=32)
    file = tmp_path / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(5)
    state = reference.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size_in, size_out = tensors.pop(name).shape
        shape = (experts, size_out, size_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(tensors, file)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    return reference


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_logits_are_those_of_transformers(tmp_path: Path, save_mxfp4: Any, paged_contexts: Any) -> None:
    check_against_reference(save_mxfp4, load(tmp_path), paged_contexts, tolerance=1e-4)


def test_int8_keeps_experts_without_loss(tmp_path: Path, save_mxfp4: Any, paged_contexts: Any) -> None:
    del save_mxfp4
    kernels, name = ReferenceKernels(), "model.layers.1.mlp.experts.gate_up_proj"
    shape = FusedExperts(5, (32, 32), 64, transposed=True, interleaved=True)
    stored = find_format({"quantization_config": {"quant_method": "mxfp4"}})
    exact_parts, rounded = (
        Checkpoint(weight_files(tmp_path), torch.bfloat16, CPU, Packer(kernels, CPU, how), stored).take_packed_experts(
            name, shape
        )
        for how in ("none", "int8")
    )
    for part in range(2):
        for expert in range(5):
            assert torch.equal(exact_parts[part][expert].data, rounded[part][expert].data)
    contexts = [paged_contexts(load(tmp_path, how, torch.float32), 1, 32) for how in ("none", "int8")]
    exact, near = (own.step({0: list(range(3, 30))})[0] for own in contexts)
    error: Tensor = (exact - near).norm() / exact.norm()
    assert 0 < error < 0.05


@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_later_starts_decode_nothing(
    tmp_path: Path, save_mxfp4: Any, paged_contexts: Any, monkeypatch: pytest.MonkeyPatch, quantization: Any
) -> None:
    del save_mxfp4
    models = []
    for number, folder in enumerate((None, tmp_path / "packed", tmp_path / "packed")):
        if number == 2:
            monkeypatch.setattr("paceline.models.formats.mx.decode_mxfp4", None)
        models.append(load_model(tmp_path, torch.bfloat16, select_kernels(CPU), CPU, folder, quantization))
    private, first, second = (
        paged_contexts(own, 1, 32, torch.bfloat16).step({0: list(range(3, 30))})[0] for own in models
    )
    assert torch.equal(private, first)
    assert torch.equal(private, second)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path, save_mxfp4: Any) -> None:
    del save_mxfp4
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    place = "model.layers.1.mlp.experts"
    del tensors[f"{place}.down_proj_scales"]
    tensors[f"{place}.gate_up_proj_blocks"] = torch.zeros(5, 64, 1, 16, dtype=torch.uint8)
    save_file(tensors, file)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert f"missing tensors: {place}.down_proj_scales" in str(caught.value)
    assert f"{place}.gate_up_proj_blocks is [5, 64, 1, 16] instead of [5, 64, 2, 16]" in str(caught.value)
    tensors[f"{place}.gate_up_proj_blocks"] = torch.zeros(5, 64, 2, 16)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"gate_up_proj_blocks has dtype torch\.float32"):
        load(tmp_path)
