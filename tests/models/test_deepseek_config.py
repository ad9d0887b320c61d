from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.config import read_config
from paceline.models.model_config import Latent, ModelConfig

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
V2_LITE: dict[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
}
V3: dict[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
}


def read(folder: Path, fields: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))
    return read_config(folder)


def test_v2_lite(tmp_path: Path) -> None:
    config = read(tmp_path, V2_LITE)
    own, experts = config.attention["full"], config.experts
    assert own.latent == Latent(rank=512, query_rank=0, plain_dim=128, rotated_dim=64, value_dim=128)
    assert (own.num_heads, own.num_kv_heads, own.head_dim, own.rotary_dim) == (16, 1, 576, 64)
    assert own.rope is not None
    assert own.rope.interleaved
    assert own.scale == 192**-0.5
    assert experts is not None
    assert experts.routing == Routing(6)
    assert (experts.count, experts.inner_size, experts.shared_size) == (64, 1408, 2816)
    assert experts.dense_layers == {0}


def test_v2_with_groups_of_experts(tmp_path: Path) -> None:
    changes = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    experts = read(tmp_path, V2_LITE, **changes).experts
    assert experts is not None
    assert experts.routing == Routing(6, groups=8, top_groups=3, factor=16.0)


def test_v3(tmp_path: Path) -> None:
    config = read(tmp_path, V3)
    own, experts = config.attention["full"], config.experts
    assert own.latent == Latent(rank=512, query_rank=1536, plain_dim=128, rotated_dim=64, value_dim=128)
    assert own.num_heads == 128
    assert experts is not None
    assert experts.routing == Routing(8, "sigmoid", True, 8, 4, "top2", 2.5)
    assert experts.shared_size == 2048
    assert experts.dense_layers == {0, 1, 2}
    rope = read(tmp_path, V3, rope_interleave=False).attention["full"].rope
    assert rope is not None
    assert not rope.interleaved


def test_a_model_without_experts(tmp_path: Path) -> None:
    assert read(tmp_path, V3, num_hidden_layers=2).experts is None


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (V3, {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "FP8, of the kind e5m2; only e4m3"),
        (V3, {"scoring_func": "softmax"}, "topk_method noaux_tc with scoring_func softmax is not supported"),
        (V3, {"n_group": 7}, r"the number of groups \(7\) must divide the number of experts \(256\)"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method noaux_tc is not supported; supported are: greedy"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2_LITE, {"attention_bias": True}, "attention_bias is not supported"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V2_LITE, {"qk_rope_head_dim": 31}, "qk_rope_head_dim must be even, not 31"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, fields, **changes)


def test_yarn_also_scales_attention(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
    own = read(tmp_path, V2_LITE, rope_scaling={**yarn, "original_max_position_embeddings": 4096}).attention["full"]
    assert own.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert own.rope is not None
    assert (own.rope.kind, own.rope.attention_factor, own.rope.original_max_position) == ("yarn", 1.0, 4096)
