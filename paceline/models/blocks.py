"""The blocks that model files are made of. Each takes its tensors from the checkpoint by the name of its place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.interface import AttentionBatch, GroupTables, HeadNorms, Kernels, LayerCache
from paceline.models.base import Weights
from paceline.models.config import ModelConfig, Rope


class Linear:
    """x [tokens, in] -> [tokens, out]."""

    def __init__(self, weights: Weights, place: str, size_in: int, size_out: int, bias: bool, kernels: Kernels) -> None:
        self._weight = weights.take_packed(f"{place}.weight", size_out, size_in)
        self._bias = weights.take(f"{place}.bias", size_out) if bias else None
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)


class RMSNorm:
    """Root mean square norm over the last dimension."""

    def __init__(
        self, weights: Weights, place: str, size: int, eps: float, kernels: Kernels, unit_offset: bool = False
    ) -> None:
        self._weight = weights.take(f"{place}.weight", size)
        self._eps = eps
        self._unit_offset = unit_offset
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps, self._unit_offset)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        return self._kernels.add_rms_norm(x, y, self._weight, self._eps, self._unit_offset)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of a step's positions: fp32 [tokens, head_dim]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """Angles of the rotary embedding, computed from the positions: no table, so no position is too large."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, kernels: Kernels) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._kernels = kernels

    def __call__(self, positions: Tensor) -> Rotation:
        return Rotation(*self._kernels.rotation(positions, self._frequencies))


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians that each pair of dimensions turns per position: fp32 [head_dim / 2].

    "llama3" leaves fast dimensions alone, slows slow ones by `factor`, and interpolates between (Llama 3.1).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "default":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.kind == "linear":
        return slowed
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * slowed


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention needs to know of a step, for the layers of one group."""

    rotation: Rotation
    batch: AttentionBatch
    group: GroupTables


class Attention:
    """Grouped-query attention over the paged cache, with optional norms of queries and keys."""

    def __init__(
        self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels, qk_norm: bool = False
    ) -> None:
        hidden, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        bias = config.attention_bias
        self._q = Linear(weights, f"{place}.q_proj", hidden, heads * head_dim, bias, kernels)
        self._k = Linear(weights, f"{place}.k_proj", hidden, kv_heads * head_dim, bias, kernels)
        self._v = Linear(weights, f"{place}.v_proj", hidden, kv_heads * head_dim, bias, kernels)
        self._o = Linear(weights, f"{place}.o_proj", heads * head_dim, hidden, bias, kernels)
        self._norms: HeadNorms | None = None
        if qk_norm:
            q_norm, k_norm = (weights.take(f"{place}.{name}.weight", head_dim) for name in ("q_norm", "k_norm"))
            self._norms = HeadNorms(q_norm, k_norm, config.norm_eps, unit_offset=True)
        self._config = config
        self._kernels = kernels

    def __call__(self, x: Tensor, cache: LayerCache, step: AttentionStep) -> Tensor:
        config, kernels = self._config, self._kernels
        queries = self._q(x).view(-1, config.num_heads, config.head_dim)
        keys = self._k(x).view(-1, config.num_kv_heads, config.head_dim)
        values = self._v(x).view(-1, config.num_kv_heads, config.head_dim)
        rotation = step.rotation
        queries = kernels.rotate_and_store(
            queries, keys, values, rotation.cos, rotation.sin, cache, step.group, self._norms
        )
        attended = kernels.attention(
            queries, cache, step.batch, step.group, config.attention_scale, config.attention_softcap
        )
        return self._o(attended.flatten(1))


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._gate = Linear(weights, f"{place}.gate_proj", hidden, inner, bias, kernels)
        self._up = Linear(weights, f"{place}.up_proj", hidden, inner, bias, kernels)
        self._down = Linear(weights, f"{place}.down_proj", inner, hidden, bias, kernels)
        self._activate = kernels.silu_and_mul if config.activation == "silu" else kernels.gelu_tanh_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate(x), self._up(x)))


class Vocabulary:
    """Token embedding and the projection back, which may share one matrix."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take_packed("model.embed_tokens.weight", *shape)
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else weights.take_packed("lm_head.weight", *shape)
        self._softcap = config.logit_softcap
        self._kernels = kernels

    @property
    def device(self) -> torch.device:
        return self._embedding.data.device

    def embed(self, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        return self._kernels.embed(token_ids, self._embedding, scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> fp32 [n, vocab]."""
        scores = self._kernels.linear(hidden, self._head).float()
        return self._softcap * torch.tanh(scores / self._softcap) if self._softcap else scores
