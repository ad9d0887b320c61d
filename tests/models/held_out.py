"""Compare models of random sizes with `transformers`, in fp32: layer counts, types of layers, windows, heads, experts.

    python -m tests.models.held_out [--family NAME ...] [--count 10] [--seed 1] [--kernels native]

Each model is a tiny random checkpoint. Its logits after prompts in chunks and in mixed batches must be those of
`transformers`. If they are not, the fields of its configuration are shown.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.kernels import select_kernels
from paceline.models.loader import load_model
from tests.models.conftest import PagedContexts
from tests.models.test_model_logits import check_against_reference
from tests.tiny_checkpoints import write_tiny

CPU = torch.device("cpu")
Fields = dict[str, Any]
VOCAB_SIZES = (101, 104, 160)


def drawn_heads(rng: random.Random) -> Fields:
    """Return numbers of heads, and a size of hidden states that they divide."""
    kv_heads, per_kv_head, head_dim = rng.randint(1, 3), rng.randint(1, 3), 4 * rng.randint(2, 9)
    heads = kv_heads * per_kv_head
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * head_dim}


def drawn_common(rng: random.Random) -> Fields:
    return {
        **drawn_heads(rng),
        "vocab_size": rng.choice(VOCAB_SIZES),
        "intermediate_size": 4 * rng.randint(3, 30),
        "num_hidden_layers": rng.randint(1, 8),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def drawn_types(rng: random.Random, layers: int, first: str, second: str) -> list[str]:
    share = rng.choice((0.2, 0.5, 0.8))
    return [first if rng.random() < share else second for _ in range(layers)]


def llama(rng: random.Random) -> Fields:
    biases = {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    return {**drawn_common(rng), **biases, "head_dim": 4 * rng.randint(2, 12)}


def qwen2(rng: random.Random) -> Fields:
    own = drawn_common(rng)
    most = rng.randint(0, own["num_hidden_layers"])
    return {**own, "use_sliding_window": True, "sliding_window": rng.randint(1, 80), "max_window_layers": most}


def qwen3(rng: random.Random) -> Fields:
    return {**drawn_common(rng), "head_dim": 4 * rng.randint(2, 12), "attention_bias": rng.random() < 0.5}


def drawn_experts(rng: random.Random) -> Fields:
    count = rng.randint(1, 12)
    chosen = rng.randint(1, count)
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": 4 * rng.randint(2, 12)}


def qwen3_moe(rng: random.Random) -> Fields:
    own = {**drawn_common(rng), **drawn_experts(rng), "head_dim": 4 * rng.randint(2, 12)}
    dense = [layer for layer in range(own["num_hidden_layers"]) if rng.random() < 0.3]
    return {**own, "mlp_only_layers": dense, "norm_topk_prob": rng.random() < 0.5}


def mixtral(rng: random.Random) -> Fields:
    count = rng.randint(1, 9)
    window = rng.choice((None, 5, 33))
    return {
        **drawn_common(rng),
        "num_local_experts": count,
        "num_experts_per_tok": rng.randint(1, count),
        "sliding_window": window,
    }


def gemma3(rng: random.Random) -> Fields:
    own = drawn_common(rng)
    return {
        **own,
        "head_dim": 4 * rng.randint(2, 12),
        "layer_types": drawn_types(rng, own["num_hidden_layers"], "sliding_attention", "full_attention"),
        "sliding_window": rng.randint(1, 80),
        "query_pre_attn_scalar": rng.randint(5, 90),
        "final_logit_softcapping": rng.choice((None, 2.0, 7.5)),
    }


def drawn_gemma4(rng: random.Random) -> Fields:
    own = drawn_common(rng)
    layers = own["num_hidden_layers"] = rng.randint(2, 12)
    kinds = [*drawn_types(rng, layers - 1, "sliding_attention", "full_attention"), "full_attention"]
    kinds[0] = "sliding_attention"
    head_dim = 8 * rng.randint(1, 5)
    return {
        **own,
        "layer_types": kinds,
        "head_dim": head_dim,
        "global_head_dim": 8 * rng.randint(1, 8),
        "sliding_window": rng.randint(2, 80),
        "final_logit_softcapping": rng.choice((None, 2.0, 7.5)),
    }


def gemma4(rng: random.Random) -> Fields:
    own = drawn_gemma4(rng)
    # The layers that store keys and values must have one of each type of the others.
    least = max(own["layer_types"].index(kind) for kind in set(own["layer_types"])) + 1
    return {
        **own,
        "num_kv_shared_layers": own["num_hidden_layers"] - rng.randint(least, own["num_hidden_layers"]),
        "use_double_wide_mlp": rng.random() < 0.5,
        "hidden_size_per_layer_input": 4 * rng.randint(1, 9),
        "vocab_size_per_layer_input": own["vocab_size"],
    }


def gemma4_dense(rng: random.Random) -> Fields:
    own = drawn_gemma4(rng)
    heads = own["num_attention_heads"]
    few = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    return {**own, "num_global_key_value_heads": few, "attention_k_eq_v": rng.random() < 0.7}


def gemma4_experts(rng: random.Random) -> Fields:
    own = drawn_experts(rng)
    own["top_k_experts"] = own.pop("num_experts_per_tok")
    return {**gemma4_dense(rng), **own}


def gpt_oss(rng: random.Random) -> Fields:
    own, count = drawn_common(rng), rng.randint(2, 9)
    return {
        **own,
        "head_dim": 4 * rng.randint(2, 12),
        "layer_types": drawn_types(rng, own["num_hidden_layers"], "sliding_attention", "full_attention"),
        "sliding_window": rng.randint(1, 80),
        "num_local_experts": count,
        "num_experts_per_tok": rng.randint(1, count),
    }


def drawn_delta(rng: random.Random) -> Fields:
    own, key_heads = drawn_common(rng), rng.randint(1, 3)
    return {
        **own,
        "head_dim": 8 * rng.randint(1, 5),
        "layer_types": drawn_types(rng, own["num_hidden_layers"], "linear_attention", "full_attention"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.randint(1, 3),
        "linear_key_head_dim": rng.randint(4, 40),
        "linear_value_head_dim": 4 * rng.randint(1, 9),
        "linear_conv_kernel_dim": rng.randint(2, 5),
    }


def qwen3_next(rng: random.Random) -> Fields:
    return {**drawn_delta(rng), **drawn_experts(rng), "shared_expert_intermediate_size": 4 * rng.randint(2, 12)}


def granite_hybrid(rng: random.Random) -> Fields:
    own = drawn_common(rng)
    heads, expand = rng.randint(1, 6), rng.choice((1, 2))
    while own["hidden_size"] * expand % heads:
        heads -= 1
    return {
        **own,
        "shared_intermediate_size": 4 * rng.randint(3, 20),
        "layer_types": drawn_types(rng, own["num_hidden_layers"], "linear_attention", "full_attention"),
        "mamba_n_heads": heads,
        "mamba_expand": expand,
        "mamba_d_state": rng.randint(4, 40),
        "mamba_d_conv": rng.randint(2, 5),
        "mamba_chunk_size": rng.choice((8, 16)),
    }


def granite_hybrid_moe(rng: random.Random) -> Fields:
    count = rng.randint(1, 9)
    own = {"num_local_experts": count, "num_experts_per_tok": rng.randint(1, count)}
    return {**granite_hybrid(rng), **own}


def deepseek_v3(rng: random.Random) -> Fields:
    own = drawn_common(rng)
    groups = rng.randint(1, 3)
    per_group = rng.randint(2, 4)
    chosen_groups = rng.randint(1, groups)
    return {
        **own,
        "num_key_value_heads": own["num_attention_heads"],
        "kv_lora_rank": 4 * rng.randint(4, 12),
        "q_lora_rank": rng.choice((None, 28)),
        "qk_nope_head_dim": 4 * rng.randint(1, 8),
        "qk_rope_head_dim": 4 * rng.randint(1, 5),
        "v_head_dim": 4 * rng.randint(1, 8),
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": chosen_groups,
        "num_experts_per_tok": rng.randint(1, chosen_groups * per_group),
        "first_k_dense_replace": rng.randint(0, own["num_hidden_layers"]),
        "moe_intermediate_size": 4 * rng.randint(2, 12),
    }


DRAWS: Mapping[str, Callable[[random.Random], Fields]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_dense": gemma4_dense,
    "gemma4_experts": gemma4_experts,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "qwen3_5": drawn_delta,
    "qwen3_5_moe": qwen3_next,
    "granite_hybrid": granite_hybrid,
    "granite_hybrid_moe": granite_hybrid_moe,
    "deepseek_v3": deepseek_v3,
}
_SUMS_IN_OTHER_ORDER = 2e-3
"""Difference between logits of models whose states the reference adds up in another order, or whose norms enlarge
small differences."""


def complaints(families: list[str], count: int, seed: int, kernels: str) -> Iterator[str]:
    """Yield a line for each model whose logits differ, and for each that cannot be loaded."""
    for family in families:
        rng = random.Random(f"{family} {seed}")
        for number in range(count):
            fields = DRAWS[family](rng)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    reference = write_tiny(Path(folder), family, **fields)
                except Exception as error:  # transformers refuses some sizes with exceptions of any type
                    print(f"{family} {number}: not made by transformers: {error}", file=sys.stderr, flush=True)
                    continue
                try:
                    model = load_model(Path(folder), torch.float32, select_kernels(CPU, kernels), CPU)
                    check_against_reference(reference, model, PagedContexts, _SUMS_IN_OTHER_ORDER)
                except Exception as error:
                    yield f"{family} {number}: {fields}: {str(error).strip()[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.held_out", description=__doc__.partition("\n")[0])
    parser.add_argument("--family", action="append", choices=list(DRAWS), help="default: all; may be repeated")
    parser.add_argument("--count", type=int, default=10, help="models of each family")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", choices=("native", "reference"), default="native")
    args = parser.parse_args()
    wrong = 0
    for complaint in complaints(args.family or list(DRAWS), args.count, args.seed, args.kernels):
        print(complaint, flush=True)
        wrong += 1
    print(f"{wrong} models differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
