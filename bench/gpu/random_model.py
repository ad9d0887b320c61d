"""A model of random weights whose tokens are predictable in part, so that drafts can be accepted without a checkpoint.

The head finds the embedding of the input token and gives a high logit to the next number of a circle of eight. Noise of
about the same strength is added, which depends on the whole context. So the model counts for a while, jumps, and counts
again. The gain of drafts depends on the strength chosen here, as it depends on the text for a real model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.kv_layout import make_layout
from paceline.core.speculative import SpeculativeConfig
from paceline.engine.constraint import Grammars
from paceline.engine.loading import Loaded
from paceline.kernels.interface import Kernels
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.adapters.linears import NamedLinears
from paceline.models.compiled import CompiledModel
from paceline.models.model_config import AttentionConfig, LayerType, ModelConfig, Rope
from paceline.models.registry import MODELS

CIRCLE = 8


def llama_config(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> ModelConfig:
    """Return the configuration of a Llama. `vocab` must be a multiple of CIRCLE."""
    full: LayerType = "full"
    head_dim = hidden // heads
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        norm_eps=1e-5,
        activation="silu",
        layer_types=(full,) * layers,
        attention={full: AttentionConfig(heads, kv_heads, head_dim, head_dim**-0.5, Rope(500_000.0))},
        tie_word_embeddings=False,
        max_position=8192,
        dtype="bfloat16",
    )


def gemma_config(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ModelConfig:
    """Return the configuration of a Gemma 3, in which five of six layers see a window of 1024 tokens."""
    kinds: tuple[LayerType, ...] = tuple("full" if layer % 6 == 5 else "sliding" for layer in range(layers))
    far = Rope(1_000_000.0, kind="linear", factor=8.0)
    full = AttentionConfig(heads, kv_heads, head_dim, (hidden // heads) ** -0.5, far)
    return replace(
        llama_config(hidden, inner, layers, heads, kv_heads, vocab),
        architecture="Gemma3ForCausalLM",
        norm_eps=1e-6,
        activation="gelu_tanh",
        layer_types=kinds,
        attention={"full": full, "sliding": replace(full, window=1024, rope=Rope(10_000.0))},
        tie_word_embeddings=True,
    )


LLAMA_8B = llama_config(4096, 14336, 32, 32, 8, 128_256)
TINY = llama_config(64, 160, 4, 4, 2, 512)
GEMMA_27B = gemma_config(5376, 21504, 62, 32, 16, 128, 262_208)
TINY_GEMMA = gemma_config(64, 160, 6, 4, 2, 16, 512)


class RandomWeights:
    """Tensors made on the device, each seeded by its name. A second model shares the same tensors.

    Args:
        signal: logit of the circle's next number, as a multiple of the best logit that the others have by chance.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, signal: float = 1.35) -> None:
        self._signal = signal
        self.config = config
        self.dtype = dtype
        self._device = device
        self._made: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._made:
            self._made[name] = self._make(name, shape)
        return self._made[name]

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, dtype=self.dtype, device=self._device)
        if name.startswith("model.embed_tokens"):
            return noise
        noise *= shape[1] ** -0.5
        if name.startswith("lm_head"):
            token = torch.arange(shape[0], device=self._device)
            before = token - token % CIRCLE + (token + CIRCLE - 1) % CIRCLE
            embedding = self.take("model.embed_tokens.weight", *shape)
            # The noise of the logits has deviation 1, so the best of n is about sqrt(2 ln n).
            return noise.add_(embedding[before], alpha=self._signal * math.sqrt(2 * math.log(shape[0])) / shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # Makes the sum of all layers about as large as the embedding.
            noise *= (2 * self.config.num_layers) ** -0.5
        return noise


class PackedWeights:
    """The `Weights` of one model, packed by its kernels."""

    def __init__(self, weights: RandomWeights, kernels: Kernels) -> None:
        self.take = self.take_table = weights.take
        self.linears = NamedLinears()
        self._kernels = kernels

    def has(self, name: str, *shape: int) -> bool:
        """Return False for names of nested text models: these weights have the names of a model for text alone."""
        return name.startswith(("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."))

    def is_one_matrix(self, name: str, other: str) -> bool:
        return True

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        weight = self.take(name, *shape)
        return self._kernels.pack(weight if order is None else weight[list(order)])

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        weight = self.take(name, sum(sizes_out), size_in)
        parts = torch.split(weight if order is None else weight[list(order)], list(sizes_out))
        return [self._kernels.pack(part) for part in parts]


def load_random(weights: RandomWeights, kernels: Kernels, speculative: SpeculativeConfig | None) -> Loaded:
    """Return the model as a worker would have loaded it."""
    model = CompiledModel(
        MODELS[weights.config.architecture](weights.config, PackedWeights(weights, kernels), kernels), kernels
    )
    layout = make_layout(model.group_shapes, weights.dtype.itemsize, "random")
    grammars = Grammars(Path())  # no request here has a constraint
    return Loaded(model, None, layout, speculative, grammars, "", kernels.chooser)
