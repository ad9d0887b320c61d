"""Gemma4ForCausalLM, and the text part of Gemma 4's models for several media."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from paceline.kernels.caches import AnyCache, LayerCache
from paceline.kernels.interface import ForwardInputs, HeadNorms, Kernels, NormKind
from paceline.kernels.transfer import to_device
from paceline.models.base import Weights
from paceline.models.blocks import AttentionStep, GatedMLP, Linear, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.experts import Router, experts_of, fused_experts
from paceline.models.model_config import Gemma4Config, LayerType, ModelConfig

_KV = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


class Gemma4(Decoder):
    """A Gemma 4 model. Most layers attend to a window, and the last ones may read the KV of earlier layers."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:

        def make_layer(layer: int, layer_place: str) -> Gemma4Layer:
            return Gemma4Layer(config, layer, weights, layer_place, kernels, reads=layer in config.kv_sources)

        super().__init__(
            config,
            weights,
            kernels,
            make_layer,
            norm_kind=NormKind.WIDE,
            embedding_scale=config.hidden_size**0.5,
        )
        has_inputs = sizes_of(config).layer_input_size > 0
        self._layer_inputs = LayerInputs(config, weights, self.place, kernels) if has_inputs else None
        layers = [f"{self.place}.layers.{layer}.self_attn." for layer in config.kv_sources]
        self.unread = [*self.unread, *(layer + part for layer in layers for part in _KV)]

    def lookups(self, token_ids: Tensor, begin: int, layers: int | None) -> Sequence[Tensor]:
        return self._layer_inputs.lookups(token_ids, begin, layers) if self._layer_inputs is not None else ()

    def _attention_steps(
        self, embedded: Tensor, inputs: ForwardInputs, further: Sequence[Tensor]
    ) -> list[AttentionStep]:
        steps = super()._attention_steps(embedded, inputs, further)
        if self._layer_inputs is None:
            return steps
        given = self._layer_inputs(embedded, further, inputs.begin, inputs.layers)
        return [replace(step, layer_input=layer_input) for step, layer_input in zip(steps, given)]


def sizes_of(config: ModelConfig) -> Gemma4Config:
    assert config.gemma4 is not None
    return config.gemma4


class LayerInputs:
    """Inputs of each layer for a token, in addition to the residual stream: a projection of the token's embedding,
    normed, plus a part of the token's row in a table (per-layer embeddings).

    The table stays in the checkpoint's file. Only the rows of a step's tokens are read, and copied to the device.
    Layers that store KV and layers after them have projections of their own, because they may run in different passes.
    """

    def __init__(self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        sizes, hidden = sizes_of(config), config.hidden_size
        size = self._size = sizes.layer_input_size
        bounds = sorted({0, config.storing_layers, config.num_layers})
        self._spans = list(pairwise(bounds))
        self._table = weights.take_table(
            f"{place}.embed_tokens_per_layer.weight", sizes.layer_input_vocab_size, config.num_layers * size
        )
        self._projections = Linear.take_parts(
            weights,
            f"{place}.per_layer_model_projection",
            hidden,
            [(end - begin) * size for begin, end in self._spans],
            False,
            kernels,
        )
        self._norm = weights.take(f"{place}.per_layer_projection_norm.weight", size)
        self._eps = config.norm_eps
        self._dtype = self._norm.dtype
        # As in the embedding, the factor is rounded to the model's dtype.
        self._row_scale = float(torch.tensor(size**0.5, dtype=self._dtype))
        self._hidden_scale = hidden**-0.5
        self._kernels = kernels

    def lookups(self, token_ids: Tensor, begin: int, layers: int | None) -> Sequence[Tensor]:
        """Return the part of the tokens' rows for each span of layers in [begin, layers), [tokens, ...] each."""
        ids = token_ids.cpu()
        rows = [
            self._table[:, first * self._size : end * self._size].index_select(0, ids).to(self._dtype)
            for first, end in self._spans_of(begin, layers)
        ]
        return [to_device(layer_rows, token_ids.device) for layer_rows in rows]

    def __call__(self, embedded: Tensor, rows: Sequence[Tensor], begin: int, layers: int | None) -> list[Tensor]:
        """Return the input of each layer in [begin, layers): [tokens, size] each.

        Args:
            embedded: [tokens, hidden].
            rows: the result of `lookups`.
        """
        kernels = self._kernels
        found: list[Tensor] = []
        for span, span_rows in zip(self._spans_of(begin, layers), rows):
            projected = kernels.scale(self._projections[self._spans.index(span)](embedded), self._hidden_scale)
            heads = projected.view(-1, span[1] - span[0], self._size)
            normed = kernels.rms_norm(heads, self._norm, self._eps, NormKind.WIDE).flatten(1)
            both = kernels.scale(kernels.add(normed, kernels.scale(span_rows, self._row_scale)), 2**-0.5)
            found += torch.split(both, self._size, dim=1)
        return found

    def _spans_of(self, begin: int, layers: int | None) -> list[tuple[int, int]]:
        return [(first, end) for first, end in self._spans if first >= begin and (layers is None or first < layers)]


class Gemma4Layer:
    """A layer of Gemma 4: attention, an MLP, perhaps experts, and an input of its own, all with norms.

    Args:
        reads: whether the layer has no keys and values of its own, and reads those of another layer.
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, place: str, kernels: Kernels, reads: bool
    ) -> None:
        sizes, hidden = sizes_of(config), config.hidden_size
        norm = partial(RMSNorm, size=hidden, eps=config.norm_eps, kernels=kernels, kind=NormKind.WIDE)
        inner = sizes.reader_intermediate_size if reads else config.intermediate_size
        self.norm = norm(weights, f"{place}.input_layernorm")
        self._attention = _Attention(config, config.layer_types[layer], weights, f"{place}.self_attn", kernels, reads)
        self._post_attention = norm(weights, f"{place}.post_attention_layernorm")
        self._pre_mlp = norm(weights, f"{place}.pre_feedforward_layernorm")
        self._mlp = GatedMLP(config, weights, f"{place}.mlp", kernels, inner=inner)
        self._experts = None if config.experts is None else _Experts(config, weights, place, kernels, norm)
        self._post_mlp = norm(weights, f"{place}.post_feedforward_layernorm")
        if size := sizes.layer_input_size:
            self._gate = Linear.take(weights, f"{place}.per_layer_input_gate", hidden, size, False, kernels)
            self._project = Linear.take(weights, f"{place}.per_layer_projection", size, hidden, False, kernels)
            self._post_input = norm(weights, f"{place}.post_per_layer_input_norm")
        scalar = weights.take(f"{place}.layer_scalar", 1)
        self._scalar = 1.0 if scalar.is_meta else float(scalar)  # on meta: missing, which the loader reports
        self._kernels = kernels

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        kernels = self._kernels
        x, normed = self._pre_mlp.of_sum(x, self._post_attention(self._attention(normed, cache, step)))
        found = self._mlp(normed)
        if self._experts is not None:
            found = self._experts.beside(found, x)
        x = kernels.add(x, self._post_mlp(found))
        if step.layer_input is not None:
            gated = kernels.gelu_tanh_and_mul(self._gate(x), step.layer_input)
            x = kernels.add(x, self._post_input(self._project(gated)))
        x = kernels.scale(x, self._scalar)
        return x, next_norm(x)


class _Experts:
    """Experts beside the MLP, with norms and a router of their own."""

    def __init__(
        self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels, norm: Callable[..., RMSNorm]
    ) -> None:
        self._post_mlp = norm(weights, f"{place}.post_feedforward_layernorm_1")
        self._pre = norm(weights, f"{place}.pre_feedforward_layernorm_2")
        self._post = norm(weights, f"{place}.post_feedforward_layernorm_2")
        # This norm has no weight, and its rounded result is multiplied by `scale`, as a rounded norm does.
        self._router_scale = weights.take(f"{place}.router.scale", config.hidden_size)
        count = experts_of(config).count
        scales = weights.take(f"{place}.router.per_expert_scale", count, dtype=torch.float32)
        self._router = Router.take(config, weights, f"{place}.router.proj", kernels, scales=scales)
        names = (f"{place}.experts.gate_up_proj", f"{place}.experts.down_proj")
        self._experts = fused_experts(config, weights, *names, kernels)
        self._eps, self._hidden_scale = config.norm_eps, config.hidden_size**-0.5
        self._kernels = kernels

    def beside(self, found: Tensor, x: Tensor) -> Tensor:
        """Return the sum of `found`, which the MLP has computed, and of the experts' results for x [tokens, hidden]."""
        kernels = self._kernels
        seen = kernels.scale(kernels.rms_norm(x, self._router_scale, self._eps), self._hidden_scale)
        ids, shares = self._router(seen)
        return kernels.add(self._post_mlp(found), self._post(kernels.experts(self._pre(x), ids, shares, self._experts)))


class _Attention:
    """Attention with norms of queries, keys and values. A layer without KV of its own only has queries."""

    def __init__(
        self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels, reads: bool
    ) -> None:
        attention = self._config = config.attention[kind]
        hidden, head_dim = config.hidden_size, attention.head_dim
        self._kernels = kernels
        self._reads = reads

        def take(name: str, heads: int) -> Linear:
            return Linear.take(weights, f"{place}.{name}", hidden, heads * head_dim, attention.bias, kernels)

        self._q, self._q_norm = take("q_proj", attention.num_heads), weights.take(f"{place}.q_norm.weight", head_dim)
        self._eps = config.norm_eps
        self._o = Linear.take(
            weights, f"{place}.o_proj", attention.num_heads * head_dim, hidden, attention.output_bias, kernels
        )
        if self._reads:
            return
        self._k = take("k_proj", attention.num_kv_heads)
        self._v = None if kind in sizes_of(config).values_from_keys else take("v_proj", attention.num_kv_heads)
        k_norm = weights.take(f"{place}.k_norm.weight", head_dim)
        self._norms = HeadNorms(self._q_norm, k_norm, config.norm_eps, NormKind.WIDE)
        self._ones = torch.ones_like(k_norm)

    def __call__(self, x: Tensor, cache: AnyCache, step: AttentionStep) -> Tensor:
        attention, kernels, rotation = self._config, self._kernels, step.rotation
        assert isinstance(cache, LayerCache)
        assert rotation is not None
        queries = self._q(x).view(-1, attention.num_heads, attention.head_dim)
        if self._reads:
            queries = kernels.rms_norm(queries, self._q_norm, self._eps, NormKind.WIDE)
            queries = kernels.rotate(queries, rotation.cos, rotation.sin)
        else:
            keys = self._k(x).view(-1, attention.num_kv_heads, attention.head_dim)
            values = keys if self._v is None else self._v(x).view(keys.shape)
            values = kernels.rms_norm(values, self._ones, self._eps, NormKind.WIDE)
            queries = kernels.rotate_and_store(
                queries, keys, values, rotation.cos, rotation.sin, cache, step.group, self._norms
            )
        attended = kernels.attention(
            queries, cache, step.batch, step.group, attention.scale, looks_ahead=attention.looks_ahead
        )
        return self._o(attended.flatten(1))
