"""Checkpoints with scales for keys and values in 8 bits load with every --kv-cache-dtype, and scales change nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError, ModelError
from paceline.core.kv_coding import KVCoding
from paceline.core.online_quantization import OnlineQuantization
from paceline.engine.loading import load
from paceline.kernels import select_kernels
from paceline.models.config import read_format, weight_form
from paceline.models.folder import count_weights
from paceline.models.formats import find_format
from tests.models.formats.stored import store
from tests.models.formats.test_modelopt import config_of, pack_fp8
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
OF_ATTENTION = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.k_zero_point")
OF_PROJECTIONS = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
MODEL_OPT = {"quant_method": "modelopt", "quant_algo": None}


def add_scales(folder: Path, layers: int, names: tuple[str, ...]) -> None:
    file = folder / "model.safetensors"
    scales = {f"model.layers.{layer}.{name}": torch.tensor(0.07) for layer in range(layers) for name in names}
    save_file(load_file(file) | scales, file)


@pytest.mark.parametrize(
    ("config", "names", "is_fp8"),
    [
        (COMPRESSED, OF_ATTENTION, False),
        (MODEL_OPT | {"kv_cache_quant_algo": "FP8"}, OF_PROJECTIONS, False),
        (MODEL_OPT | {"kv_cache_scheme": SCHEME}, OF_PROJECTIONS, False),
        (config_of("FP8", kv_cache_quant_algo="FP8"), OF_PROJECTIONS, True),
        ({"quant_method": "fp8"}, OF_ATTENTION, True),
    ],
)
def test_scales_of_keys_and_values_are_left_out(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, config: dict[str, Any], names: tuple[str, ...], is_fp8: bool
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192, head_dim=32)
    store(tmp_path, reference, config, lambda _, weight: pack_fp8(weight) if is_fp8 else ({"weight": weight}, weight))
    weights = count_weights(tmp_path, read_format(tmp_path))
    add_scales(tmp_path, reference.config.num_hidden_layers, names)
    assert count_weights(tmp_path, read_format(tmp_path)) == weights
    with pytest.raises(ConfigError, match="are quantized as") if is_fp8 else nullcontext():
        assert weight_form(tmp_path, "mxfp8") == OnlineQuantization.of("mxfp8")  # of matrices that are not quantized
    for dtype in ("auto", "int8", "fp8_e4m3"):
        coding = KVCoding.parse(dtype, "")
        loaded = load(tmp_path, torch.float32, CPU, select_kernels(CPU), None, kv_coding=coding)
        assert {group.shape.code for group in loaded.layout.groups} == {coding.code}
        if dtype == "auto":  # keys and values have the type of the model, whatever the checkpoint's scheme says
            check_against_reference(reference, loaded.model, paged_contexts)


@pytest.mark.parametrize("config", [COMPRESSED | {"kv_cache_scheme": None}, MODEL_OPT])
def test_a_config_that_quantizes_nothing_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config_groups is empty|the algorithm None"):
        find_format({"quantization_config": config})
