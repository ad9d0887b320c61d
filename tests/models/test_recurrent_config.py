from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.model_config import DeltaNet, Mamba, Rope
from tests.models.configs import (
    GRANITE,
    QWEN3_5,
    QWEN3_NEXT,
    read,
)


def test_granite_hybrid(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE)
    assert config.layer_types == ("mamba", "full", "mamba")
    assert config.mamba == Mamba(heads=48, head_dim=32, state_size=128, conv_taps=4, conv_bias=True, bias=False)
    assert (config.mamba.inner_size, config.mamba.conv_channels) == (1536, 1792)
    attention = config.attention["full"]
    assert (attention.scale, attention.rope, config.intermediate_size) == (0.015625, None, 2048)
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_divisor) == (12.0, 0.246, 3.0)
    assert read(tmp_path, GRANITE, position_embedding_type="rope").attention["full"].rope == Rope(10_000.0)
    assert read(tmp_path, GRANITE, mamba_d_head="auto").mamba == config.mamba
    unscaled = read(tmp_path, GRANITE, attention_multiplier=None).attention["full"]
    assert unscaled.scale == unscaled.head_dim**-0.5
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        assert read(tmp_path, GRANITE, time_step_limit=limit) == config
    names = ["linear_attention", "full_attention", "linear_attention"]
    assert read(tmp_path, GRANITE, layer_types=names) == config


def test_qwen3_next(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT)
    assert config.layer_types == ("delta", "delta", "delta", "full") * 2
    assert config.delta == DeltaNet(32, 16, key_dim=128, value_dim=128, conv_taps=4, grouped=True)
    assert config.delta.conv_channels == 8192
    attention = config.attention["full"]
    assert (attention.gated, attention.scale, attention.rope) == (True, 256**-0.5, Rope(1e7, rotated_dims=64))
    experts = config.experts
    assert experts.routing == Routing(10, normalize=True)
    assert (experts.count, experts.inner_size, experts.shared_size, experts.dense_layers) == (512, 512, 512, {2})
    assert read(tmp_path, QWEN3_NEXT, decoder_sparse_step=2).experts.dense_layers == {0, 2, 4, 6}
    assert read(tmp_path, QWEN3_NEXT, num_experts=0).experts is None
    assert read(tmp_path, QWEN3_NEXT, partial_rotary_factor=None) == config
    assert read(tmp_path, QWEN3_NEXT, partial_rotary_factor=1.0).attention["full"].rope == Rope(1e7)


def test_qwen3_5_is_the_text_model_of_a_model_for_images(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_5)
    assert config.layer_types == ("delta", "delta", "delta", "full")
    assert config.delta == DeltaNet(32, 16, key_dim=128, value_dim=128, conv_taps=4, grouped=False)
    assert (config.dtype, config.tie_word_embeddings, config.max_position) == ("bfloat16", True, 262144)
    assert config.attention["full"].rope == Rope(1e7, rotated_dims=64, sections=(11, 11, 10))
    assert (config.has_grids, config.encoding_size) == (True, 2048)
    assert config.experts.routing == Routing(8, normalize=True)
    text = {**QWEN3_5["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "bfloat16"}
    alone = read(tmp_path, text, tie_word_embeddings=True)
    assert not alone.has_grids
    assert replace(alone, architecture=config.architecture, attention=config.attention) == config
    dense = read(tmp_path, text, architectures=["Qwen3_5ForCausalLM"], intermediate_size=9216)
    assert (dense.experts, dense.intermediate_size, dense.delta) == (None, 9216, config.delta)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (
            GRANITE,
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "a token cannot have 5 experts: it chooses among 4",
        ),
        (GRANITE, {"layer_types": ["mamba", "conv", "mamba"]}, "layer type conv is not supported"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type alibi is not supported"),
        (GRANITE, {"mamba_n_heads": 40}, r"mamba_n_heads \(40\) times mamba_d_head \(32\) must be 1536"),
        (GRANITE, {"mamba_n_groups": 2}, "more than one group"),
        (GRANITE, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (GRANITE, {"hidden_act": "gelu_pytorch_tanh"}, "Mamba layers need hidden_act silu"),
        (QWEN3_NEXT, {"hidden_act": "gelu_pytorch_tanh"}, "linear attention need hidden_act silu"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] * 7}, "layer_types names 7 layers, num_hidden_layers 8"),
        (QWEN3_NEXT, {"layer_types": ["sliding_attention"] * 8}, "layer type sliding_attention is not supported"),
        (QWEN3_NEXT, {"linear_num_key_heads": 12}, r"32 value heads .* cannot share 12 key heads .* evenly"),
        (QWEN3_NEXT, {"partial_rotary_factor": 0.35}, "0.35 must rotate an even number of 256 dimensions"),
        (QWEN3_NEXT, {"num_experts": 8}, "a token cannot have 10 experts: it chooses among 8"),
        (QWEN3_5, {"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq; supported are awq"),
        (QWEN3_5, {"text_config": {"num_hidden_layers": 2}}, "vocab_size is missing"),
        (QWEN3_5, {"text_config": ["x"]}, r"text_config must be an object, not \['x'\]"),
        (QWEN3_NEXT, {"partial_rotary_factor": 0}, "0.0 must rotate an even number of 256 dimensions"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, fields, **changes)
