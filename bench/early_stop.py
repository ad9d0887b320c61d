"""Prompt tokens per second of a model whose last layers have no KV of their own, with and without stopping before them.

    python -m bench.early_stop [--tokens 2048] [--chunk 512] [--threads 1]

The model has the layers of Gemma 4 E2B at half their width and random weights. A prompt is computed in chunks, and the
last token's logits are wanted. Both ways take turns, and figures are medians. With one thread they are CPU time, which
other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch

from bench.forward import arena_memory, make_batch
from bench.gpu.random_model import RandomWeights, llama_config, load_random
from bench.kernels import medians
from paceline.engine.loading import Loaded
from paceline.engine.runner import layer_caches
from paceline.kernels.native import NativeKernels
from paceline.models.model_config import AttentionConfig, Gemma4Config, LayerType, ModelConfig, Rope

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
SLIDING: LayerType = "sliding"
FULL: LayerType = "full"


def e2b_config() -> ModelConfig:
    """Return the configuration of E2B with half of its widths and a small vocabulary."""
    kinds = ((SLIDING,) * 4 + (FULL,)) * 7
    full = AttentionConfig(8, 1, 256, 1.0, Rope(1_000_000.0, "proportional", rotated_dims=64))
    return replace(
        llama_config(768, 3072, len(kinds), 8, 1, 8192),
        architecture="Gemma4ForCausalLM",
        norm_eps=1e-6,
        activation="gelu_tanh",
        layer_types=kinds,
        attention={FULL: full, SLIDING: replace(full, head_dim=128, window=512, rope=Rope(10_000.0))},
        tie_word_embeddings=True,
        gemma4=Gemma4Config((), reader_intermediate_size=6144, layer_input_size=128, layer_input_vocab_size=8192),
        kv_sources={layer: 14 if kinds[layer] == FULL else 13 for layer in range(15, len(kinds))},
        logit_softcap=30.0,
    )


def prompt_pass(loaded: Loaded, tokens: int, chunk: int, stops: bool) -> Callable[[], object]:
    """Return a function that computes a prompt of `tokens` tokens."""
    model, layout = loaded.model, loaded.layout
    caches = layer_caches(layout, arena_memory(layout.slots_for(tokens) * layout.slot_bytes))
    ids = torch.arange(tokens) % model.config.vocab_size
    ends = [min(tokens, begin + chunk) for begin in range(0, tokens, chunk)]
    steps = [(slice(begin, end), make_batch(layout, 1, end - begin, end)) for begin, end in zip([0, *ends], ends)]

    def run() -> object:
        for own, batch in steps:
            wanted = [int(own.stop == tokens)] if stops else None
            hidden = model.forward(ids[own], torch.arange(own.start, own.stop), caches, batch, wanted=wanted)
        return model.logits(hidden[-1:])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_random(RandomWeights(e2b_config(), DTYPE, CPU), NativeKernels(options.threads), None)
    with torch.inference_mode():
        runs = [prompt_pass(loaded, options.tokens, options.chunk, stops) for stops in (False, True)]
        whole, early = medians(options.rounds, *runs)
    print(f"all tokens through all layers: {options.tokens / whole:8.0f} tokens/s")
    print(f"stopping early:                {options.tokens / early:8.0f} tokens/s, {whole / early:.2f} times as many")


if __name__ == "__main__":
    main()
