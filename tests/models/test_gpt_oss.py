from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.kernels.reference import ReferenceKernels
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import read_config
from paceline.models.folder import weight_files
from paceline.models.gpt_oss import GptOss
from paceline.models.packing.quantized import Packer


def test_a_norm_rounds_once_as_in_transformers(tmp_path: Path, save_gpt_oss: Any) -> None:
    reference, kernels = save_gpt_oss(dtype=torch.bfloat16), ReferenceKernels()
    device = torch.device("cpu")
    checkpoint = Checkpoint(weight_files(tmp_path), torch.bfloat16, device, Packer(kernels, device))
    model = GptOss(read_config(tmp_path), checkpoint, kernels)
    layer, theirs = model._layers[1], reference.model.layers[1]
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    for own, expected in (
        (model._norm, reference.model.norm),
        (layer.norm, theirs.input_layernorm),
        (layer._mlp_norm, theirs.post_attention_layernorm),
    ):
        assert torch.equal(own(x), expected(x))
