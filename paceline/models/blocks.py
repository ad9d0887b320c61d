"""Building blocks of model files. Each takes its tensors from the checkpoint by a prefix of their names (`place`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.adapters import AdapterKernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import AnyCache, LayerCache
from paceline.kernels.interface import HeadNorms, Kernels, Logits, NormKind
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.adapters.linears import LayerAdapters
from paceline.models.base import Weights
from paceline.models.model_config import LayerType, ModelConfig, Rope
from paceline.models.order import gated_order
from paceline.models.rotary import Rotation, rotary_order


def tensor_name(place: str, name: str) -> str:
    """Return the name of a tensor below a prefix, which may be empty."""
    return f"{place}.{name}" if place else name


class Linear:
    """A linear layer: x [tokens, in] -> [tokens, out]."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, kernels: Kernels) -> None:
        self._weight = weight
        self.bias = bias
        self._kernels = kernels
        self.adapters: LayerAdapters | None = None

    @classmethod
    def take(
        cls,
        weights: Weights,
        place: str,
        size_in: int,
        size_out: int,
        bias: bool,
        kernels: Kernels,
        order: Sequence[int] | None = None,
    ) -> Linear:
        """Take a layer from a checkpoint, with its outputs in `order`; None keeps the checkpoint's order."""
        weight = weights.take_packed(f"{place}.weight", size_out, size_in, order=order)
        own_bias = weights.take(f"{place}.bias", size_out) if bias else None
        linear = cls(weight, own_bias if own_bias is None or order is None else own_bias[order], kernels)
        weights.linears.note(place, [linear], size_in, [size_out], order)
        return linear

    @classmethod
    def take_parts(
        cls,
        weights: Weights,
        place: str,
        size_in: int,
        sizes_out: Sequence[int],
        bias: bool,
        kernels: Kernels,
        order: Sequence[int] | None = None,
    ) -> list[Linear]:
        """Make several layers from one matrix of the checkpoint, [sum(sizes_out), size_in].

        Args:
            order: the order of the matrix's outputs in the layers; None keeps the checkpoint's order.
        """
        parts = weights.take_packed_parts(f"{place}.weight", sizes_out, size_in, order)
        biases: Sequence[Tensor | None] = [None] * len(parts)
        if bias:
            whole = weights.take(f"{place}.bias", sum(sizes_out))
            biases = torch.split(whole if order is None else whole[order], list(sizes_out))
        linears = [cls(weight, part_bias, kernels) for weight, part_bias in zip(parts, biases)]
        weights.linears.note(place, linears, size_in, sizes_out, order)
        return linears

    def __call__(self, x: Tensor) -> Tensor:
        y = self._kernels.linear(x, self._weight, self.bias)
        if self.adapters is not None:
            self.adapters.add(y, x)
        return y

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def products(self, rows: Tensor, kernels: AdapterKernels) -> Tensor:
        """Return the products of rows [n, in] of any dtype with the matrix, in the model's dtype: [n, out]."""
        return kernels.linear(rows.to(self._weight.data.device, self._weight.dtype), self._weight)


class RMSNorm:
    """Root mean square norm over the last dimension."""

    def __init__(
        self, weights: Weights, place: str, size: int, eps: float, kernels: Kernels, kind: NormKind = NormKind.ROUNDED
    ) -> None:
        self._weight = weights.take(f"{place}.weight", size)
        self._eps = eps
        self._kind = kind
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps, self._kind)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y, and the norm of this sum."""
        return self._kernels.add_rms_norm(x, y, self._weight, self._eps, self._kind)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The inputs of attention, or of a recurrent mixer, in one step, for the layers of one group."""

    rotation: Rotation | None
    """Angles of queries and keys by their positions; None if they are not rotated."""
    batch: AttentionBatch
    group: GroupTables
    layer_input: Tensor | None = None
    """[tokens, ...]: an input of this layer alone, besides the residual stream; None in models without such inputs."""


class Attention:
    """Grouped-query attention over the paged cache, with optional norms of queries and keys.

    Args:
        norms: the kind of the norms of queries and keys (`q_norm` and `k_norm`); None without such norms.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerType,
        weights: Weights,
        place: str,
        kernels: Kernels,
        norms: NormKind | None = None,
    ) -> None:
        attention, hidden = config.attention[kind], config.hidden_size
        self._config = attention
        self._kernels = kernels

        def take(name: str, heads: int, rope: Rope | None = None) -> Linear:
            order = rotary_order(rope, heads, attention.head_dim)
            return Linear.take(
                weights, f"{place}.{name}", hidden, heads * attention.head_dim, attention.bias, kernels, order
            )

        self._gate: Linear | None = None
        if attention.gated:
            self._q, self._gate = Linear.take_parts(
                *(
                    weights,
                    f"{place}.q_proj",
                    hidden,
                    (attention.num_heads * attention.head_dim,) * 2,
                    attention.bias,
                    kernels,
                ),
                order=gated_order(attention),
            )
        else:
            self._q = take("q_proj", attention.num_heads, attention.rope)
        self._k = take("k_proj", attention.num_kv_heads, attention.rope)
        self._v = take("v_proj", attention.num_kv_heads)
        self._o = Linear.take(
            weights, f"{place}.o_proj", attention.num_heads * attention.head_dim, hidden, attention.output_bias, kernels
        )
        self._sinks = weights.take(f"{place}.sinks", attention.num_heads).float() if attention.sinks else None
        self._norms: HeadNorms | None = None
        if norms is not None:
            order = rotary_order(attention.rope, 1, attention.head_dim)
            q_norm, k_norm = (
                weights.take(f"{place}.{name}.weight", attention.head_dim) for name in ("q_norm", "k_norm")
            )
            if order is not None:
                q_norm, k_norm = q_norm[order], k_norm[order]
            self._norms = HeadNorms(q_norm, k_norm, config.norm_eps, norms)

    def __call__(self, x: Tensor, cache: AnyCache, step: AttentionStep) -> Tensor:
        attention, kernels = self._config, self._kernels
        assert isinstance(cache, LayerCache)
        queries = self._q(x).view(-1, attention.num_heads, attention.head_dim)
        keys = self._k(x).view(-1, attention.num_kv_heads, attention.head_dim)
        values = self._v(x).view(-1, attention.num_kv_heads, attention.head_dim)
        gate = None if self._gate is None else self._gate(x)
        rotation = step.rotation
        if rotation is not None and rotation.of_queries is not None:
            assert self._norms is None
            queries = kernels.rotate(queries, rotation.of_queries.cos, rotation.of_queries.sin)
            kernels.store_kv(kernels.rotate(keys, rotation.cos, rotation.sin), values, cache, step.group)
        elif rotation is not None:
            queries = kernels.rotate_and_store(
                queries, keys, values, rotation.cos, rotation.sin, cache, step.group, self._norms
            )
        else:
            assert self._norms is None
            kernels.store_kv(keys, values, cache, step.group)
        attended = kernels.attention(
            queries,
            cache,
            step.batch,
            step.group,
            attention.scale,
            sinks=self._sinks,
            looks_ahead=attention.looks_ahead,
            both_sides=attention.both_sides,
        )
        rows = attended.flatten(1)
        return self._o(rows if gate is None else kernels.sigmoid_and_mul(gate, rows))


class GatedMLP:
    """An MLP with a gate: x -> down(activation(gate(x)) * up(x)).

    Args:
        fused: whether the checkpoint stores gate and up as one matrix.
        inner: the inner size; by default that of the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        place: str,
        kernels: Kernels,
        fused: bool = False,
        inner: int | None = None,
    ) -> None:
        hidden, inner, bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        if fused:
            self._gate, self._up = Linear.take_parts(
                weights, f"{place}.input_linear", hidden, (inner, inner), bias, kernels
            )
        else:
            self._gate = Linear.take(weights, f"{place}.gate_proj", hidden, inner, bias, kernels)
            self._up = Linear.take(weights, f"{place}.up_proj", hidden, inner, bias, kernels)
        down = f"{place}.output_linear" if fused else f"{place}.down_proj"
        self._down = Linear.take(weights, down, inner, hidden, bias, kernels)
        self._activate = kernels.silu_and_mul if config.activation == "silu" else kernels.gelu_tanh_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate(x), self._up(x)))


class Embedding:
    """The token embedding and the projection of hidden states to logits, which may share one matrix. A checkpoint that
    only pools has no projection.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, place: str = "model") -> None:
        shape = (config.vocab_size, config.hidden_size)
        embedding = tensor_name(place, "embed_tokens.weight")
        head = "language_model.lm_head.weight" if place == "language_model.model" else "lm_head.weight"
        # Like transformers: a checkpoint that has two different matrices is right, and its config is not.
        tied = config.has_head and config.tie_word_embeddings and weights.is_one_matrix(embedding, head)
        if tied and not weights.has(embedding) and weights.has(head):
            embedding = head
        self._embedding = weights.take_packed(embedding, *shape)
        self._head = self._embedding if tied or not config.has_head else weights.take_packed(head, *shape)
        self._adapted = Linear(self._head, None, kernels)
        """The projection as adapters know it. In PEFT, an adapter of it never changes the embedding."""
        if config.has_head:
            weights.linears.note(head.removesuffix(".weight"), [self._adapted], config.hidden_size, shape[:1])
        self._softcap = config.logit_softcap
        self._divisor = config.logits_divisor
        self._kernels = kernels

    @property
    def device(self) -> torch.device:
        return self._embedding.data.device

    def embed(self, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        """Return the embeddings of int64 [tokens], times `scale`: [tokens, hidden]."""
        return self._kernels.embed(token_ids, self._embedding, scale)

    def logits(self, hidden: Tensor) -> Logits:
        """Return the logits of the token after each of hidden [n, hidden]."""
        logits = self._kernels.logits(hidden, self._head)
        if (adapters := self._adapted.adapters) is not None and adapters.changes:
            adapters.add(logits.values, hidden.float())
            logits = Logits(logits.values)  # another token may be the best
        if self._divisor != 1.0:
            logits = Logits(logits.values / self._divisor)
        if self._softcap:
            logits = Logits(self._softcap * torch.tanh(logits.values / self._softcap))
        return logits
