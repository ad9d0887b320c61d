"""DeepseekV2ForCausalLM and DeepseekV3ForCausalLM: attention over latent vectors, and experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels.caches import AnyCache, LayerCache
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import AttentionStep, GatedMLP, Linear, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.experts import MixtureOfExperts, Router, experts_of, separate_experts
from paceline.models.layers import PreNormLayer
from paceline.models.model_config import LayerType, ModelConfig
from paceline.models.rotary import rotary_order

_LATENT_EPS = 1e-6
"""The `eps` of the norms of latent vectors, which does not depend on the `eps` of other norms."""


class Deepseek(Decoder):
    """A DeepSeek model: a few layers with an MLP, then layers with experts."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        def make_layer(layer: int, place: str) -> PreNormLayer:
            kind, mlp = config.layer_types[layer], f"{place}.mlp"
            attention = LatentAttention(config, kind, weights, f"{place}.self_attn", kernels)
            make_mlp = _experts if config.has_experts(layer) else GatedMLP
            return PreNormLayer(config, weights, place, kernels, attention, make_mlp(config, weights, mlp, kernels))

        super().__init__(config, weights, kernels, make_layer)


class LatentAttention:
    """Attention over latent vectors, of which the keys and values of all heads are linear functions.

    A head's key and value are never computed. The score of a query q and a key U c, where c is the latent vector, is
    (U.T q) c. So each head's query is multiplied by U.T, and heads attend to the latent vectors as if these were the
    keys and values of one shared head. The result of a head, a weighted sum of latent vectors, is then multiplied by
    the head's matrix for values. A second part of queries and keys is rotated. All heads share the rotated key, which
    is cached behind the latent vector. (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.)
    """

    def __init__(self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels) -> None:
        self._config = attention = config.attention[kind]
        assert attention.latent is not None
        self._latent = latent = attention.latent
        self._kernels = kernels
        hidden, heads, plain, rank = config.hidden_size, attention.num_heads, latent.plain_dim, latent.rank
        order = rotary_order(attention.rope, 1, latent.rotated_dim)

        def ordered(rows: Tensor) -> Tensor:
            return rows if order is None else rows[..., list(order), :]

        def take(name: str, size_out: int, size_in: int, *parts: Callable[[Tensor], Tensor]) -> list[Linear]:
            packed = weights.take_packed_derived(f"{place}.{name}.weight", (size_out, size_in), parts)
            return [Linear(weight, None, kernels) for weight in packed]

        def of_heads(matrix: Tensor) -> Tensor:
            return matrix.view(heads, -1, matrix.shape[1])

        self._q_down: Linear | None = None
        name, size_in = "q_proj", hidden
        if latent.query_rank:
            name, size_in = "q_b_proj", latent.query_rank
            self._q_down = Linear.take(weights, f"{place}.q_a_proj", hidden, size_in, False, kernels)
            self._q_norm = RMSNorm(weights, f"{place}.q_a_layernorm", size_in, _LATENT_EPS, kernels)
        self._q, self._q_rotated = take(
            name,
            heads * (plain + latent.rotated_dim),
            size_in,
            lambda matrix: of_heads(matrix)[:, :plain].flatten(0, 1),
            lambda matrix: ordered(of_heads(matrix)[:, plain:]).flatten(0, 1),
        )
        self._c, self._k_rotated = take(
            "kv_a_proj_with_mqa",
            rank + latent.rotated_dim,
            hidden,
            lambda matrix: matrix[:rank],
            lambda matrix: ordered(matrix[rank:]),
        )
        self._c_norm = RMSNorm(weights, f"{place}.kv_a_layernorm", rank, _LATENT_EPS, kernels)
        self._to_latent, self._to_values = weights.take_packed_derived(
            f"{place}.kv_b_proj.weight",
            (heads * (plain + latent.value_dim), rank),
            (lambda matrix: of_heads(matrix)[:, :plain].mT, lambda matrix: of_heads(matrix)[:, plain:]),
        )
        self._o = Linear.take(weights, f"{place}.o_proj", heads * latent.value_dim, hidden, False, kernels)

    def __call__(self, x: Tensor, cache: AnyCache, step: AttentionStep) -> Tensor:
        attention, latent, kernels, rotation = self._config, self._latent, self._kernels, step.rotation
        assert isinstance(cache, LayerCache)
        assert rotation is not None

        def rotated(part: Tensor, heads: int) -> Tensor:
            return kernels.rotate(part.view(-1, heads, latent.rotated_dim), rotation.cos, rotation.sin)

        source = x if self._q_down is None else self._q_norm(self._q_down(x))
        queries = self._q(source).view(-1, attention.num_heads, latent.plain_dim)
        turned = rotated(self._q_rotated(source), attention.num_heads)
        queries = kernels.concat(kernels.linear_heads(queries, self._to_latent), turned)
        keys = self._c_norm(self._c(x)).view(-1, 1, latent.rank)
        keys = kernels.concat(keys, rotated(self._k_rotated(x), 1))
        kernels.store_kv(keys, keys, cache, step.group)
        attended = kernels.attention(queries, cache, step.batch, step.group, attention.scale)
        return self._o(kernels.linear_heads(attended[..., : latent.rank], self._to_values).flatten(1))


def _experts(config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> MixtureOfExperts:
    experts = experts_of(config)
    correction = None
    if experts.routing.scores == "sigmoid":
        correction = weights.take(f"{place}.gate.e_score_correction_bias", experts.count, dtype=torch.float32)
    shared = None
    if experts.shared_size:
        shared = GatedMLP(config, weights, f"{place}.shared_experts", kernels, inner=experts.shared_size)
    return MixtureOfExperts(
        Router.take(config, weights, f"{place}.gate", kernels, correction),
        separate_experts(config, weights, f"{place}.experts", kernels),
        kernels,
        shared,
    )
