"""Tokens per second of a model whose last layers have no KV of their own, with and without stopping before them.

    python -m bench.compute.early_stop [--width 768] [--tokens 2048] [--chunk 512] [--threads 1] [--transformers]

The model has the layers of Gemma 4 E2B, whose width is 1536, and random weights. A prompt is computed in chunks, and
the last token's logits are wanted. `--transformers` adds its code for a model of the same sizes, which gets the prompt
as a whole and stops early, too. All ways take turns, and figures are medians. With one thread they are CPU time, which
other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench.compute.forward import arena_memory, make_batch
from bench.compute.kernels import medians
from bench.gpu.random_model import RandomWeights, llama_config, load_random
from bench.serving.load import table
from paceline.engine.loading import Loaded
from paceline.engine.runner import layer_caches
from paceline.kernels.interface import ForwardInputs
from paceline.kernels.native import NativeKernels
from paceline.models.config.fields import LAYER_TYPES
from paceline.models.model_config import AttentionConfig, Gemma4Config, LayerType, ModelConfig, Rope

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
SLIDING: LayerType = "sliding"
FULL: LayerType = "full"
STORING = 15
"""Layers with KV of their own, at the beginning."""


def e2b_config(width: int) -> ModelConfig:
    """Return the configuration of E2B for hidden states of `width` numbers, with a small vocabulary."""
    kinds = ((SLIDING,) * 4 + (FULL,)) * 7
    head_dim = width // 6
    full = AttentionConfig(8, 1, 2 * head_dim, 1.0, Rope(1_000_000.0, "proportional", rotated_dims=2 * (head_dim // 4)))
    return replace(
        llama_config(width, 4 * width, len(kinds), 8, 1, 8192),
        architecture="Gemma4ForCausalLM",
        norm_eps=1e-6,
        activation="gelu_tanh",
        layer_types=kinds,
        attention={FULL: full, SLIDING: replace(full, head_dim=head_dim, window=512, rope=Rope(10_000.0))},
        tie_word_embeddings=True,
        gemma4=Gemma4Config(
            (), reader_intermediate_size=8 * width, layer_input_size=width // 6, layer_input_vocab_size=8192
        ),
        kv_sources={layer: 14 if kinds[layer] == FULL else 13 for layer in range(STORING, len(kinds))},
        logit_softcap=30.0,
    )


def transformers_model(own: ModelConfig) -> Any:
    """Return a model of transformers with the sizes of `own`."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    assert own.gemma4 is not None
    names = {kind: name for name, kind in LAYER_TYPES.items()}
    config = Gemma4TextConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=own.num_layers,
        layer_types=[names[kind] for kind in own.layer_types],
        num_attention_heads=own.attention[FULL].num_heads,
        num_key_value_heads=own.attention[FULL].num_kv_heads,
        head_dim=own.attention[SLIDING].head_dim,
        global_head_dim=own.attention[FULL].head_dim,
        sliding_window=own.attention[SLIDING].window,
        num_kv_shared_layers=own.num_layers - STORING,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=own.gemma4.layer_input_size,
        vocab_size_per_layer_input=own.gemma4.layer_input_vocab_size,
        final_logit_softcapping=own.logit_softcap,
        max_position_embeddings=own.max_position,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        return Gemma4ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


class Ours:
    """A context of one request, computed by Paceline."""

    def __init__(self, loaded: Loaded, prompt: int, generated: int, chunk: int, stops: bool) -> None:
        layout = self._layout = loaded.layout
        self._model, self._stops = loaded.model, stops
        self._caches = layer_caches(layout, arena_memory(layout.slots_for(prompt + generated) * layout.slot_bytes))
        self._ids = torch.arange(prompt + generated) % loaded.model.config.vocab_size
        ends = [min(prompt, begin + chunk) for begin in range(0, prompt, chunk)]
        self._chunks = [(begin, end, end == prompt) for begin, end in zip([0, *ends], ends)]
        self._single = [(place, place + 1, True) for place in range(prompt, prompt + generated)]

    def prefill(self) -> None:
        for step in self._chunks:
            self._run(*step)

    def decode(self) -> None:
        for step in self._single:
            self._run(*step)

    def _run(self, begin: int, end: int, ends: bool) -> None:
        batch = make_batch(self._layout, 1, end - begin, end)
        wanted = [int(ends)] if self._stops else None
        inputs = ForwardInputs(self._ids[begin:end], torch.arange(begin, end), self._caches, batch)
        hidden = self._model.forward(inputs, wanted)
        if ends:
            self._model.logits(hidden[-1:])


class Theirs:
    """A context of one request, computed by transformers."""

    def __init__(self, model: Any, prompt: int, generated: int) -> None:
        self._model, self._prompt = model, prompt
        self._ids = (torch.arange(prompt + generated) % model.config.vocab_size).unsqueeze(0)
        self._found: Any = None

    def prefill(self) -> None:
        self._found = self._model(self._ids[:, : self._prompt], use_cache=True, logits_to_keep=1)

    def decode(self) -> None:
        """Compute tokens one by one. The context grows in each call, which hardly changes the time of a token."""
        for token in self._ids[0, self._prompt :]:
            cache = self._found.past_key_values
            self._found = self._model(token.view(1, 1), past_key_values=cache, use_cache=True)


def ways(options: argparse.Namespace) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return, for each way, the functions that compute the prompt and the tokens after it."""
    config, sizes = e2b_config(options.width), (options.tokens, options.generated)
    loaded = load_random(RandomWeights(config, DTYPE, CPU), NativeKernels(options.threads), None)
    found: dict[str, Ours | Theirs] = {
        "all layers": Ours(loaded, *sizes, options.chunk, stops=False),
        "stopping early": Ours(loaded, *sizes, options.chunk, stops=True),
    }
    if options.transformers:
        found["transformers"] = Theirs(transformers_model(config), *sizes)
    return {name: (functions.prefill, functions.decode) for name, functions in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768, help="size of hidden states, a multiple of 96; E2B's is 1536")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--generated", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", action="store_true", help="measure transformers, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        both = ways(options)
        prefills, decodes = zip(*both.values())
        prefill = [options.tokens / seconds for seconds in medians(options.rounds, *prefills)]
        decode = [options.generated / seconds for seconds in medians(options.rounds, *decodes)]
    rows = [
        [name, f"{fast:.0f}", f"{fast / prefill[0]:.2f}", f"{slow:.1f}"]
        for name, fast, slow in zip(both, prefill, decode)
    ]
    print(table(["way", "prompt tokens/s", "times all layers", "tokens/s of one stream"], rows))


if __name__ == "__main__":
    main()
