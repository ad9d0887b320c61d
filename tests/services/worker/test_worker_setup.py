from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.core.config import WorkerConfig
from paceline.core.numerics import Numerics
from paceline.kernels.native.kernels import INTEGER_PRODUCTS
from paceline.kernels.native.library import instruction_sets
from paceline.services.worker.worker_setup import ComputeOptions


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["none", "int8", "gguf"])
def test_numerics_name_a_quantization_that_changes_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instruction_set: str, dtype: str, quantization: str
) -> None:
    monkeypatch.setenv("PACELINE_ISA", instruction_set)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = WorkerConfig(model=str(tmp_path), dtype=dtype, quantization=quantization, model_impl="native")
    options = ComputeOptions.resolve(config)
    changes_bits = quantization == "int8" or (dtype == "bfloat16" and instruction_set in INTEGER_PRODUCTS)
    named = quantization if changes_bits else "none"
    assert options.numerics == Numerics(instruction_set, dtype, named)


def test_weights_in_float16_are_computed_in_bfloat16(tmp_path: Path) -> None:
    config = {"architectures": ["OtherForCausalLM"], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ComputeOptions.resolve(WorkerConfig(model=str(tmp_path))).dtype == torch.bfloat16
    assert ComputeOptions.resolve(WorkerConfig(model=str(tmp_path), dtype="float32")).dtype == torch.float32
