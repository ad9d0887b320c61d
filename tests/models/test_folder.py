from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import ModelError
from paceline.models.folder import count_weights


def test_weights_are_counted_from_headers(tmp_path: Path) -> None:
    tensors = {
        "norm.weight": torch.zeros(5, dtype=torch.bfloat16),
        "up.weight": torch.zeros(3, 7),
        "experts.up_blocks": torch.zeros(2, 4, 16, dtype=torch.uint8),  # two weights in a byte
        "experts.up_scales": torch.zeros(2, 4, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert count_weights(tmp_path) == 5 + 21 + 256


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or not a safetensors file"):
        count_weights(tmp_path)
