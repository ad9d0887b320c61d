from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.model_config import Experts, Rope
from tests.models.configs import (
    GPT_OSS,
    LLAMA,
    QWEN3_MOE,
    read,
)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_qwen3_moe(tmp_path: Path, name: str) -> None:
    fields = {**QWEN3_MOE, name: QWEN3_MOE["num_experts"]}
    if name != "num_experts":
        del fields["num_experts"]
    experts = read(tmp_path, fields, norm_topk_prob=True).experts
    assert (experts.count, experts.inner_size, experts.shared_size) == (12, 24, 0)
    assert experts.routing == Routing(3, normalize=True)
    assert experts.dense_layers == {0, 2, 3, 4}
    assert not read(tmp_path, fields).experts.routing.normalize


def test_windows_of_models_with_experts(tmp_path: Path) -> None:
    qwen = read(tmp_path, QWEN3_MOE, use_sliding_window=True, sliding_window=512, max_window_layers=3)
    assert (set(qwen.layer_types), qwen.attention["sliding"].window) == ({"sliding"}, 512)
    assert set(read(tmp_path, QWEN3_MOE, sliding_window=512).layer_types) == {"full"}
    mixtral = {**LLAMA, "architectures": ["MixtralForCausalLM"]}
    assert read(tmp_path, mixtral).attention["full"].rope.theta == 1_000_000.0
    assert read(tmp_path, mixtral, sliding_window=4096).attention["sliding"].window == 4096
    # Its code ignores the types of layers.
    names = ["full_attention", "sliding_attention"]
    assert set(read(tmp_path, mixtral, sliding_window=4096, layer_types=names).layer_types) == {"sliding"}


def test_gpt_oss(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS, quantization_config={"quant_method": "mxfp4"})
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert config.layer_types == ("sliding", "full", "sliding")
    assert (full.window, sliding.window, full.sinks, sliding.sinks, full.output_bias) == (0, 128, True, True, True)
    assert full.rope is not None
    assert (full.rope.theta, full.rope.factor, full.rope.truncate) == (150_000.0, 32.0, False)
    assert full.rope.attention_factor == pytest.approx(1.3466, abs=1e-4)
    assert config.experts == Experts(32, 80, Routing(4, normalize=True), "clamped_swiglu", bias=True)
    assert config.dtype == "bfloat16"
    plain = read(tmp_path, GPT_OSS, rope_parameters={}).attention["full"].rope
    assert plain == Rope(150_000.0)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (GPT_OSS, {"swiglu_limit": 10.0}, "swiglu_limit 10.0 is not supported; supported is 7.0"),
        (GPT_OSS, {"quantization_config": {"quant_method": "quark"}}, "quantized by quark; supported are awq, "),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, fields, **changes)
