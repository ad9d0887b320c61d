"""Engines whose keys and values have 8 bits: tokens do not depend on how the loop runs, and differ from 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_coding import KVCoding
from paceline.core.kv_layout import KV_CACHE_PART
from paceline.engine.loading import load as load_whole
from paceline.engine.runner import layer_caches
from paceline.kernels import select_kernels
from paceline.kernels.caches import LayerCache, LayerState
from paceline.kernels.codes import CODES
from paceline.services.common.layout import difference, layout_from_pb, layout_to_pb
from tests.engine.loops import Loop, assert_same, expected, load
from tests.engine.test_decode_loop import requests
from tests.tiny_checkpoints import write_tiny

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, object]] = {
    "llama": {"head_dim": 16},
    "gemma3": {"head_dim": 32},
    "granite_hybrid": {"num_attention_heads": 3, "num_key_value_heads": 3},
}
WIDE_STATES: dict[str, object] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "mamba_d_state": 64,
    "num_hidden_layers": 8,
    "layer_types": ["mamba"] * 7 + ["attention"],
}
"""Changes of a hybrid model whose states are much larger than its keys and values."""


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("family", MODELS)
def test_tokens_do_not_depend_on_how_the_loop_runs_or_where_blocks_lie(family: str, code: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, family, **MODELS[family])
    model = load(tmp_path)
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked, code)
    # Blocks are swapped out and in again with a pool that holds one context or two and a half.
    for drafter, contexts in (("early", None), ("none", 1), ("lookup", 2.5)):
        loop = Loop(model, 2, drafter, contexts_on_device=contexts, code=code)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        assert (loop.engine.stats.stored_blocks > 0) == (contexts is not None)
    with pytest.raises(AssertionError):  # 8 bits change a probability
        assert_same(expected(model, asked), wanted)


@pytest.mark.filterwarnings("ignore:overflow ", "ignore:invalid value ", "ignore:divide by zero ")
@pytest.mark.parametrize("other", ["native", "triton"])
def test_all_kernels_give_nearly_the_logits_of_the_reference(other: str, tmp_path: Path) -> None:
    if other == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    write_tiny(tmp_path, "llama", head_dim=16)
    found = []
    for name in (other, "reference"):
        loaded = load_whole(tmp_path, torch.float32, CPU, select_kernels(CPU, name), None, kv_coding=KVCoding("int8"))
        loop = Loop(loaded.model, 1, "none", code="int8")
        asked = requests(loaded.model.config.vocab_size)[:2]
        found.append(loop.run([(prompt[:20], sampling) for prompt, sampling in asked]))
        loop.engine.stop()
    assert_same(*found)


def test_the_type_of_keys_and_values_changes_the_fingerprint_and_unequal_ones_are_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", head_dim=32)
    kernels, bf16 = select_kernels(CPU, "native"), torch.bfloat16
    layouts = {
        dtype: load_whole(tmp_path, bf16, CPU, kernels, None, kv_coding=KVCoding.parse(dtype, "")).layout
        for dtype in ("auto", *CODES)
    }
    assert len({layout.fingerprint for layout in layouts.values()}) == 3
    assert KV_CACHE_PART not in dict(layouts["auto"].parts)
    told = {dtype: layout_from_pb(layout_to_pb(layout)) for dtype, layout in layouts.items()}
    assert difference(told["int8"], told["auto"]) == "its --kv-cache-dtype is auto, the arena's is int8"
    assert difference(told["auto"], told["fp8_e4m3"]) == "its --kv-cache-dtype is fp8_e4m3, the arena's is auto"


def test_only_keys_and_values_are_coded(tmp_path: Path) -> None:
    write_tiny(tmp_path, "granite_hybrid", **MODELS["granite_hybrid"])
    model = load(tmp_path)
    loop = Loop(model, 1, "none", code="int8")
    loop.engine.stop()
    caches = layer_caches(loop.layout, loop.slots.view(-1))
    states = [cache for cache in caches if isinstance(cache, LayerState)]
    coded = [cache for cache in caches if isinstance(cache, LayerCache)]
    assert states
    assert coded
    assert all(part.dtype == torch.float32 for cache in states for part in cache.parts)
    assert all(cache.scales is not None for cache in coded)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("deepseek_v2", {}, "--kv-cache-dtype int8 is not available for latent vectors"),
        ("llama", {"head_dim": 20}, "needs heads of a multiple of 16 numbers, and this model's have 20"),
    ],
)
def test_models_whose_keys_have_no_tiles_are_refused(
    family: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    write_tiny(tmp_path, family, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"")  # they are refused before weights are read
    with pytest.raises(ConfigError, match=said):
        load_whole(tmp_path, torch.float32, CPU, select_kernels(CPU, "native"), None, kv_coding=KVCoding("int8"))


def test_states_of_a_loaded_model_are_divided_for_the_code(tmp_path: Path) -> None:
    write_tiny(tmp_path, "granite_hybrid", **WIDE_STATES)
    kernels = select_kernels(CPU, "native")
    whole, own = (
        load_whole(tmp_path, torch.bfloat16, CPU, kernels, None, kv_coding=KVCoding.parse(dtype, ""))
        for dtype in ("auto", "int8")
    )
    assert len(own.layout.groups) > len(whole.layout.groups)
    assert own.layout.slot_bytes < 0.7 * whole.layout.slot_bytes
    assert own.model.group_shapes == tuple(group.shape for group in own.layout.groups)
    asked = requests(own.model.config.vocab_size)[:3]
    wanted = expected(load_whole(tmp_path, torch.float32, CPU, kernels, None).model, asked, "int8")
    found = load_whole(tmp_path, torch.float32, CPU, kernels, None, kv_coding=KVCoding("int8")).model
    assert_same(expected(found, asked, "int8"), wanted)  # the division of the layers changes no token


@pytest.mark.parametrize(("family", "skip"), [("llama", "1"), ("gemma3", "sliding_window"), ("gemma3", "0")])
def test_layers_that_are_not_coded_have_groups_of_their_own(family: str, skip: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, family, **MODELS[family])
    kernels, coding = select_kernels(CPU, "native"), KVCoding.parse("int8", skip)
    model = load_whole(tmp_path, torch.float32, CPU, kernels, None, kv_coding=coding).model
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked)
    for drafter, contexts in (("early", None), ("lookup", 2.5)):
        loop = Loop(model, 2, drafter, contexts_on_device=contexts)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
    types = [cache.first.dtype for cache in layer_caches(loop.layout, loop.slots.view(-1))]
    assert set(types) == {torch.float32, torch.uint8}
    whole = load(tmp_path)
    for code in ("", "int8"):
        with pytest.raises(AssertionError):
            assert_same(expected(whole, asked, code), wanted)


def test_a_layout_names_the_layers_that_are_not_coded(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", head_dim=32)
    kernels, bf16 = select_kernels(CPU, "native"), torch.bfloat16
    ours, theirs = (
        load_whole(tmp_path, bf16, CPU, kernels, None, kv_coding=KVCoding.parse("int8", skip)).layout
        for skip in ("", "1")
    )
    told = "its --kv-cache-dtype is int8 --kv-cache-dtype-skip-layers 1, the arena's is int8"
    assert difference(ours, layout_from_pb(layout_to_pb(theirs))) == told
