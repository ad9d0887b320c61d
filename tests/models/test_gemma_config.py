from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.core.media import MediaKind
from paceline.models.config import read_config
from paceline.models.model_config import Experts, Gemma4Config, Rope
from tests.models.configs import (
    GEMMA,
    GEMMA4,
    gemma4_text,
    read,
)

UNIFIED = "Gemma4UnifiedForConditionalGeneration"
UNIFIED_TEXT = {name: own for name, own in GEMMA4["text_config"].items() if name != "use_bidirectional_attention"}


def test_gemma3_old_style(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        GEMMA,
        rope_theta=2e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
    )
    assert config.layer_types == ("sliding", "sliding", "full", "sliding", "sliding", "full", "sliding", "sliding")
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert (full.rope, sliding.rope) == (Rope(2e6, "linear", 8.0), Rope(2e4))
    assert (full.window, sliding.window) == (0, 512)
    assert (full.scale, sliding.scale, config.tie_word_embeddings) == (256**-0.5, 256**-0.5, True)


def test_gemma3_new_style(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        GEMMA,
        layer_types=["full_attention"] * 7 + ["sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        },
        query_pre_attn_scalar=168,
        final_logit_softcapping=30.0,
    )
    assert config.layer_types == ("full",) * 7 + ("sliding",)
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert (full.rope, sliding.rope) == (Rope(2e6, "linear", 8.0), Rope(2e4))
    assert (full.scale, config.logit_softcap) == (168**-0.5, 30.0)


def test_gemma3_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA)
    assert config.layer_types == ("sliding",) * 5 + ("full",) + ("sliding",) * 2
    assert (config.attention["full"].rope, config.attention["sliding"].rope) == (Rope(1_000_000.0), Rope(10_000.0))


def test_gemma4_with_layers_that_read_others(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA4)
    assert config.kv_sources == {layer: 14 if layer % 5 == 4 else 13 for layer in range(15, 35)}
    assert (config.storing_layers, config.num_layers, config.dtype) == (15, 35, "bfloat16")
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert (full.head_dim, sliding.head_dim, full.num_kv_heads, sliding.num_kv_heads) == (512, 256, 1, 1)
    assert (full.window, sliding.window, full.scale, config.logit_softcap) == (0, 512, 1.0, 30.0)
    assert full.rope == Rope(1_000_000.0, "proportional", rotated_dims=128)
    assert sliding.rope == Rope(10_000.0)
    assert config.gemma4 == Gemma4Config((), 12_288, 256, 262_144)
    assert (config.intermediate_size, config.tie_word_embeddings, config.experts) == (6144, True, None)


def test_gemma4_as_transformers_saves_it(tmp_path: Path) -> None:
    released = read(tmp_path, GEMMA4)
    transformers.Gemma4Config(**GEMMA4).save_pretrained(tmp_path)
    # The numbers of layers have leading zeros there.
    assert "04" in json.loads((tmp_path / "config.json").read_text())["text_config"]["per_layer_config"]
    assert read_config(tmp_path).attention == released.attention


def test_gemma4_with_values_from_keys_and_experts(tmp_path: Path) -> None:
    text = {
        **GEMMA4["text_config"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }
    config = read(tmp_path, GEMMA4, text_config=text)
    assert (config.attention["full"].num_kv_heads, config.attention["sliding"].num_kv_heads) == (2, 8)
    assert config.gemma4 == Gemma4Config(("full",), 12_288, 0, 0)
    assert (config.kv_sources, config.storing_layers) == ({}, 35)
    assert config.experts == Experts(128, 704, Routing(8, normalize=True), "gelu_tanh")


@pytest.mark.parametrize(
    ("fields", "changes", "full", "sliding"),
    [
        (GEMMA, {}, False, False),
        (GEMMA, {"architectures": ["Gemma3ForConditionalGeneration"]}, True, True),
        (GEMMA4, {}, False, False),
        (GEMMA4, gemma4_text(use_bidirectional_attention="vision"), False, True),
        (GEMMA4, {"architectures": [UNIFIED], "text_config": UNIFIED_TEXT}, False, True),
        (GEMMA4, {"architectures": [UNIFIED], **gemma4_text(use_bidirectional_attention=None)}, False, False),
    ],
)
def test_tokens_of_an_image_look_ahead(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], full: bool, sliding: bool
) -> None:
    config = read(tmp_path, fields, **changes)
    assert (config.attention["full"].looks_ahead, config.attention["sliding"].looks_ahead) == (full, sliding)
    assert config.whole_media == ({MediaKind.IMAGE, MediaKind.VIDEO_FRAME} if sliding else set())


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers 8"),
        (GEMMA, {"layer_types": ["chunked_attention"] * 8}, "layer type chunked_attention is not supported"),
        (GEMMA, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must name the layer types"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        (GEMMA, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a finite number that is not negative"),
        (GEMMA4, gemma4_text(rope_parameters={"rope_theta": 1e4}), "rope_parameters must name the layer types"),
        (GEMMA4, gemma4_text(use_bidirectional_attention="all"), "bidirectional"),
        (GEMMA4, gemma4_text(quantization_config={"quant_method": "hqq"}), "quantized by hqq; supported are awq"),
        (GEMMA4, gemma4_text(vocab_size_per_layer_input=1000), "vocab_size_per_layer_input .1000. must not be below"),
        (GEMMA4, gemma4_text(num_kv_shared_layers=32), "leaves no full_attention layer"),
        (GEMMA4, gemma4_text(num_kv_shared_layers=-1), "num_kv_shared_layers must be a positive whole number, not -1"),
        (GEMMA4, gemma4_text(per_layer_config={"4": {"head_dim": 512}}), "must be the same for all full_attention"),
        (GEMMA4, gemma4_text(per_layer_config={"0": {"window": 1}}), "must be the same for all sliding_attention"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, fields, **changes)


def test_windows_of_a_gemma3_whose_tokens_see_each_other_have_both_sides(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA, use_bidirectional_attention=True)
    assert config.bidirectional
    assert not config.whole_media
    assert {(each.looks_ahead, each.both_sides) for each in config.attention.values()} == {(True, True)}
    assert config.attention["sliding"].window == 257
