from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import ModelError
from paceline.models.folder import count_weights
from paceline.models.formats import find_format


def test_weights_are_counted_from_headers(tmp_path: Path) -> None:
    tensors = {
        "norm.weight": torch.zeros(5, dtype=torch.bfloat16),
        "up.weight": torch.zeros(3, 7),
        "experts.up_blocks": torch.zeros(2, 4, 16, dtype=torch.uint8),  # two weights in a byte
        "experts.up_scales": torch.zeros(2, 4, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert count_weights(tmp_path, find_format({"quantization_config": {"quant_method": "mxfp4"}})) == 5 + 21 + 256


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({"quant_method": "awq"}, {"qweight": (32, 8), "qzeros": (1, 8), "scales": (1, 64)}),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": 32},
            {"qweight": (8, 64), "qzeros": (1, 16), "g_idx": (32,)},
        ),
        ({"quant_method": "fp8"}, {"weight": (64, 32), "weight_scale_inv": (1, 1)}),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
            },
            {"weight_packed": (64, 4), "weight_scale": (64, 1), "weight_shape": (2,)},
        ),
    ],
)
def test_quantized_weights_are_counted_as_weights(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]
) -> None:
    dtypes = {"qweight": torch.int32, "weight_packed": torch.int32}
    saved = {f"up.{part}": torch.zeros(shape, dtype=dtypes.get(part, torch.float32)) for part, shape in tensors.items()}
    save_file({"norm.weight": torch.zeros(5), **saved}, tmp_path / "model.safetensors")
    assert count_weights(tmp_path, find_format({"quantization_config": config})) == 5 + 64 * 32


def test_whole_matrices_in_the_dtype_of_codes_are_counted_once(tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
    tensors = {
        "up.weight": torch.zeros(64 * 32 // 4, 1),
        "embed.weight": torch.zeros(16, 32),
        "norm.weight": torch.ones(5),
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert count_weights(tmp_path, find_format({"quantization_config": config})) == 64 * 32 + 16 * 32 + 5


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or not a safetensors file"):
        count_weights(tmp_path, None)
