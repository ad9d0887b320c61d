"""Comparison of logits with transformers, in fp32, for tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.kernels import select_kernels
from paceline.kernels.interface import Forward, Taps
from paceline.kernels.native import NativeKernels
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.tiny_checkpoints import (
    DIVIDED,
    write_gemma3_with_vision,
    write_mistral3_with_vision,
    write_qwen3_5_with_vision,
    write_qwen3_vl,
    write_tiny,
)

CPU = torch.device("cpu")
Load = Callable[[Path], Model]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own-head-dim": {"head_dim": 20},
    "no-gqa": {"num_key_value_heads": 6},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}
LINEAR_FULL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMAS: dict[str, dict[str, Any]] = {
    "default": {},
    "untied-softcap": {"tie_word_embeddings": False, "final_logit_softcapping": 2.0},
    "linear-rope": {"rope_parameters": LINEAR_FULL},
    "own-layer-types": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "only-sliding": {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2},
    "biases": {"attention_bias": True},
    "divided-groups": DIVIDED,
}

HYBRIDS: dict[str, dict[str, Any]] = {
    "default": {},
    "rope": {"position_embedding_type": "rope"},
    "biases": {"attention_bias": True, "mamba_proj_bias": True},
    "no-conv-bias-tied": {"mamba_conv_bias": False, "tie_word_embeddings": True},
    "own-sizes": {"mamba_expand": 1, "mamba_n_heads": 3, "mamba_d_state": 33, "mamba_d_conv": 2},
    "only-mamba": {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3},
    "experts": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("save_qwen3_moe", {}),
    "qwen3_moe-not-normalized": ("save_qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2}),
    "granite_moe": ("save_granite_moe", {}),
    "mixtral": ("save_mixtral", {"num_experts_per_tok": 5, "sliding_window": 20}),
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
DEEPSEEKS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("save_deepseek_v2", {}),
    "v2-dense": ("save_deepseek_v2", {"q_lora_rank": 28, "first_k_dense_replace": 3, "mlp_bias": True}),
    "v2-groups": ("save_deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "v3-no-shared-experts": ("save_deepseek_v3", {"n_shared_experts": 0}),
    "v3-yarn": ("save_deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    "v3-own-order": ("save_deepseek_v3", {"rope_interleave": False, "n_group": 1, "topk_group": 1}),
}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LIKE_LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"use_sliding_window": False, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-windows": (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "mistral": ("mistral", {}),
    "mistral-yarn": ("mistral", {"sliding_window": None, "rope_parameters": {**YARN, "truncate": False}}),
    "ministral": ("ministral", {}),
    "ministral3": ("ministral3", {}),
    "smollm3": ("smollm3", {}),
    "gpt_oss": ("gpt_oss", {}),
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 2, 2],
    "mrope_interleaved": True,
}
DELTA_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DELTA_NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("save_qwen3_next", {}),
    "qwen3_next-yarn": ("save_qwen3_next", {"rope_parameters": DELTA_YARN}),
    "qwen3_next-dense": ("save_qwen3_next", {"num_experts": 0, "attention_bias": True, "linear_num_key_heads": 6}),
    "qwen3_5": ("save_qwen3_5", {}),
    "qwen3_5-own-sizes-tied": (
        "save_qwen3_5",
        {"linear_key_head_dim": 33, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    ),
    "qwen3_5-only-delta": ("save_qwen3_5", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
    "qwen3_5_moe": ("save_qwen3_5_moe", {}),
}


@pytest.fixture(params=["native", "reference"])
def load(request: pytest.FixtureRequest) -> Load:
    return lambda folder: load_model(folder, torch.float32, select_kernels(CPU, request.param), CPU)


def random_tokens(vocab: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def reference_logits(reference: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def same(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def check_against_reference(reference: Any, model: Model, paged_contexts: Any, tolerance: float = 2e-5) -> None:
    """Compare three requests in mixed batches: a whole prompt, a prompt in chunks, and a prompt token by token."""
    whole, chunked, single = random_tokens(model.config.vocab_size, 75, 63, 20)
    contexts = paged_contexts(model, 3, 128)
    parts: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}

    def step(tokens: dict[int, list[int]]) -> None:
        for request, logits in contexts.step(tokens).items():
            parts[request].append(logits)

    step({2: single[:1]})
    step({0: whole[:60], 2: single[1:2], 1: chunked[:17]})
    step({1: chunked[17:18]})
    step({2: single[2:3], 1: chunked[18:50]})
    step({1: chunked[50:], 0: whole[60:61]})
    for position in range(61, 75):
        step({0: whole[position : position + 1], 2: single[position - 58 : position - 57]})
    step({2: single[17:]})
    for request, tokens in enumerate((whole, chunked, single)):
        same(torch.cat(parts[request]), reference_logits(reference, tokens), tolerance)


@pytest.mark.parametrize("changes", LLAMAS.values(), ids=LLAMAS)
def test_llama(tmp_path: Path, save_llama: Any, paged_contexts: Any, changes: dict[str, Any], load: Load) -> None:
    check_against_reference(save_llama(**changes), load(tmp_path), paged_contexts)


@pytest.mark.parametrize(("family", "changes"), LIKE_LLAMA.values(), ids=LIKE_LLAMA)
def test_models_with_the_layers_of_llama(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    paged_contexts: Any,
    family: str,
    changes: dict[str, Any],
    load: Load,
) -> None:
    reference = request.getfixturevalue(f"save_{family}")(**changes)
    check_against_reference(reference, load(tmp_path), paged_contexts)


@pytest.mark.parametrize("changes", GEMMAS.values(), ids=GEMMAS)
def test_gemma3(tmp_path: Path, save_gemma3: Any, paged_contexts: Any, changes: dict[str, Any], load: Load) -> None:
    check_against_reference(save_gemma3(**changes), load(tmp_path), paged_contexts)


@pytest.mark.parametrize("changes", HYBRIDS.values(), ids=HYBRIDS)
def test_granite_hybrid(
    tmp_path: Path, save_granite_hybrid: Any, paged_contexts: Any, changes: dict[str, Any], load: Load
) -> None:
    # The reference computes states in chunks, and so adds in another order.
    check_against_reference(save_granite_hybrid(**changes), load(tmp_path), paged_contexts, tolerance=2e-4)


@pytest.mark.parametrize(("fixture", "changes"), EXPERTS.values(), ids=EXPERTS)
def test_experts(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    paged_contexts: Any,
    fixture: str,
    changes: dict[str, Any],
    load: Load,
) -> None:
    check_against_reference(request.getfixturevalue(fixture)(**changes), load(tmp_path), paged_contexts)


@pytest.mark.parametrize(("fixture", "changes"), DELTA_NETS.values(), ids=DELTA_NETS)
def test_delta_nets(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    paged_contexts: Any,
    fixture: str,
    changes: dict[str, Any],
    load: Load,
) -> None:
    # The reference computes states in chunks, and so adds in another order. The norm of each head's result enlarges the
    # difference where the result is small.
    reference = request.getfixturevalue(fixture)(**changes)
    check_against_reference(reference, load(tmp_path), paged_contexts, tolerance=1e-3)


@pytest.mark.parametrize("has_head", [False, True])
def test_gemma3_with_vision(tmp_path: Path, paged_contexts: Any, load: Load, has_head: bool) -> None:
    reference = write_gemma3_with_vision(tmp_path)
    if has_head:  # Embedding and head are one matrix, which may have either name.
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        (embedding,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
        tensors[embedding.replace("model.embed_tokens", "lm_head")] = tensors.pop(embedding)
        save_file(tensors, file, {"format": "pt"})
    check_against_reference(reference, load(tmp_path), paged_contexts)


@pytest.mark.parametrize("nested", [False, True], ids=["new names", "old names"])
@pytest.mark.parametrize("family", ["mistral", "ministral3"])
def test_mistral3_with_vision(tmp_path: Path, paged_contexts: Any, family: str, nested: bool, load: Load) -> None:
    reference = write_mistral3_with_vision(tmp_path, family)
    if nested:  # as older releases of transformers saved it
        file = tmp_path / "model.safetensors"
        tensors = {
            name.replace("model.language_model.", "language_model.model.").replace(
                "lm_head", "language_model.lm_head"
            ): own
            for name, own in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    check_against_reference(reference, load(tmp_path), paged_contexts)


@pytest.mark.parametrize(("experts", "tied"), [(False, False), (True, True)], ids=["dense", "experts"])
def test_delta_nets_with_vision(tmp_path: Path, paged_contexts: Any, experts: bool, tied: bool, load: Load) -> None:
    changes = {} if experts else {"rope_parameters": MROPE}
    reference = write_qwen3_5_with_vision(tmp_path, experts, tied, **changes)
    check_against_reference(reference, load(tmp_path), paged_contexts, tolerance=1e-3)


@pytest.mark.parametrize("kind", ["dense", "experts", "released-experts"])
def test_qwen3_vl(tmp_path: Path, paged_contexts: Any, kind: str, load: Load) -> None:
    reference = write_qwen3_vl(tmp_path, experts=kind != "dense")
    if kind == "released-experts":  # matrices [in, out], which transformers turns
        file = tmp_path / "model.safetensors"
        tensors = {
            name: own.transpose(1, 2).contiguous() if ".experts." in name else own
            for name, own in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    check_against_reference(reference, load(tmp_path), paged_contexts)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of a model without shared experts
@pytest.mark.parametrize("name", DEEPSEEKS)
def test_deepseek(tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, name: str, load: Load) -> None:
    family, changes = DEEPSEEKS[name]
    # The reference computes the keys and values of each head, and so adds in another order.
    check_against_reference(request.getfixturevalue(family)(**changes), load(tmp_path), paged_contexts, 5e-5)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_dense", "gemma4_experts"])
def test_gemma4(tmp_path: Path, paged_contexts: Any, family: str, load: Load) -> None:
    # What a layer reads of a token is normed, and so are values, which makes small differences larger.
    check_against_reference(write_tiny(tmp_path, family), load(tmp_path), paged_contexts, tolerance=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite_hybrid", "deepseek_v2", "gemma4", "qwen3_5"])
def test_taps_receive_the_hidden_states_of_the_reference(
    tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, load: Load, family: str
) -> None:
    reference = request.getfixturevalue(f"save_{family}")()
    (tokens,) = random_tokens(100, 30)
    model = load(tmp_path)
    last = model.config.num_layers
    taps = Taps((0, 2, last))
    paged_contexts(model, 1, 30).step({0: tokens}, taps)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert list(taps.states) == [0, 2, last]
    for depth in (0, 2):
        same(taps.states[depth], wanted[depth][0], tolerance=2e-4)
    assert not torch.equal(taps.states[last], taps.states[2])  # the reference shows the last layer after the norm


def test_a_sharded_checkpoint_computes_the_same(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, load: Load
) -> None:
    reference = save_llama(max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_against_reference(reference, load(tmp_path), paged_contexts)


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": LLAMA3_ROPE}], ids=["default", "llama3"])
def test_positions_up_to_the_last_one_work(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, rope: Any, load: Load
) -> None:
    reference = save_llama(max_position_embeddings=700, num_hidden_layers=1, **rope)
    (tokens,) = random_tokens(101, 700)
    contexts = paged_contexts(load(tmp_path), 1, 700)
    parts = [contexts.step({0: tokens[start : start + 100]})[0] for start in range(0, 700, 100)]
    same(torch.cat(parts), reference_logits(reference, tokens))


def test_groups_of_llama(tmp_path: Path, save_llama: Any, load: Load) -> None:
    save_llama()
    model = load(tmp_path)
    assert [(shape.name, shape.layers, shape.window) for shape in model.group_shapes] == [("full", (0, 1, 2), 0)]
    assert model.layer_groups == (0, 0, 0)


def test_groups_of_gemma3(tmp_path: Path, save_gemma3: Any, load: Load) -> None:
    save_gemma3()
    model = load(tmp_path)
    assert [(shape.name, shape.layers, shape.window) for shape in model.group_shapes] == [
        ("sliding", (0, 1, 2, 3, 4, 6), 20),
        ("full", (5,), 0),
    ]
    assert model.layer_groups == (0, 0, 0, 0, 0, 1, 0)


def test_groups_of_layers_that_cache_much_more_than_others(tmp_path: Path, save_gemma3: Any, load: Load) -> None:
    save_gemma3(**DIVIDED)
    model = load(tmp_path)
    assert [(shape.name, shape.layers, shape.window) for shape in model.group_shapes] == [
        ("sliding-0", (0, 1, 2, 3), 20),
        ("sliding-1", (5, 6, 7, 8, 9), 20),
        ("full", (4,), 0),
    ]
    assert model.layer_groups == (0, 0, 0, 0, 2, 1, 1, 1, 1, 1)


def test_groups_of_deepseek(tmp_path: Path, save_deepseek_v3: Any, load: Load) -> None:
    save_deepseek_v3()
    (shape,) = load(tmp_path).group_shapes
    assert (shape.name, shape.layers, shape.kv_heads, shape.head_dim, shape.planes) == ("full", (0, 1, 2), 1, 48, 1)


def test_groups_of_granite_hybrid(tmp_path: Path, save_granite_hybrid: Any, load: Load) -> None:
    save_granite_hybrid()
    model = load(tmp_path)
    full, states = model.group_shapes
    assert (full.name, full.layers, full.window, full.state) == ("full", (2, 4), 0, ())
    assert (states.layers, states.window, states.state) == ((0, 1, 3), 2, ((4, 24, 20), (1, 140), (3, 136)))
    assert model.layer_groups == (1, 1, 0, 1, 0)


def test_groups_of_qwen3_next(tmp_path: Path, save_qwen3_next: Any, load: Load) -> None:
    save_qwen3_next()
    model = load(tmp_path)
    full, states = model.group_shapes
    assert (full.name, full.layers, full.window, full.state) == ("full", (1,), 0, ())
    assert (states.layers, states.window, states.state) == ((0, 2, 3), 2, ((6, 12, 20), (1, 180), (3, 168)))
    assert model.layer_groups == (1, 0, 1, 1)


def test_logits_are_fp32_whatever_the_dtype(tmp_path: Path, save_llama: Any) -> None:
    save_llama(dtype=torch.bfloat16)
    model = load_model(tmp_path, torch.bfloat16, select_kernels(CPU), CPU)
    assert model.logits(torch.zeros(2, 48, dtype=torch.bfloat16)).values.dtype == torch.float32


class PlainKernels(NativeKernels):
    """Native kernels that do not record a forward pass."""

    def compile(self, forward: Forward) -> Forward:
        return forward


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite_hybrid", "gemma4", "qwen3_5"])
def test_a_compiled_pass_shows_the_hidden_states_of_the_plain_one(
    tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, family: str
) -> None:
    request.getfixturevalue(f"save_{family}")()
    (tokens,) = random_tokens(100, 30)
    found = []
    for kernels in (NativeKernels(1), PlainKernels(1)):
        model = load_model(tmp_path, torch.float32, kernels, CPU)
        last = model.config.num_layers
        taps = Taps((0, 1, last))
        found.append((paged_contexts(model, 1, 30).step({0: tokens}, taps)[0], taps.states))
    (compiled, compiled_states), (plain, states) = found
    assert torch.equal(compiled, plain)
    assert all(torch.equal(states[depth], compiled_states[depth]) for depth in (0, 1, last))
