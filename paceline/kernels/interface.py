"""The interface between models and the code that computes, with every operation of a model's hot path.

A backend is one class with the methods of `Kernels`: `ReferenceKernels` in plain torch, `NativeKernels` for CPUs, and
`TritonKernels` for GPUs. A model gets its backend from its caller and calls nothing else on its hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.turns import Turns
from paceline.kernels.adapters import AdapterKernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import AnyCache, LayerCache
from paceline.kernels.choosing import TokenChooser
from paceline.kernels.encoding import EncoderKernels
from paceline.kernels.experts import ExpertKernels
from paceline.kernels.packed_weight import Allocate, PackedWeight
from paceline.kernels.quantized import QuantizedMatrix, QuantizedRows
from paceline.kernels.recurrence import RecurrentKernels


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of the next token for some rows of a step."""

    values: Tensor
    """fp32 [rows, vocab]: logits of all tokens."""
    best: Tensor | None = None
    """int64 [rows]: the first token with the largest logit of each row; None if the kernel has not found it."""


class NormKind(IntEnum):
    """The way in which `Kernels.rms_norm` multiplies by its weight. Code on GPUs uses the same numbers."""

    ROUNDED = 0
    """x / RMS is rounded to x's dtype, and multiplied in it (Llama)."""
    UNIT_OFFSET = 1
    """The factor is 1 + weight, and all is in fp32 (Gemma 1 to 3)."""
    WIDE = 2
    """The factor is the weight, and all is in fp32 (Gemma 4, GPT-OSS)."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] and options of `Kernels.rms_norm` over each head of queries and of keys."""

    queries: Tensor
    keys: Tensor
    eps: float
    kind: NormKind


@dataclass(slots=True)
class Taps:
    """Further results of a forward pass: hidden states for drafters that were trained on them, and flags of tokens
    whose values are not all finite.
    """

    depths: tuple[int, ...] = ()
    """Numbers of layers after which states are taken; 0 is the embedding."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """[tokens, hidden] for each depth, as the next layer receives it."""
    broken: Tensor | None = None
    """bool [tokens]: whether a token's hidden state has NaN or infinity, so that its KV is useless. `Model.forward`
    sets this field.
    """

    def see(self, depth: int, x: Tensor) -> None:
        """Keep x, the states after `depth` layers, if `depths` has this depth."""
        if depth in self.depths:
            self.states[depth] = x

    def check(self, hidden: Tensor) -> None:
        """Set `broken` from hidden [tokens, hidden]."""
        self.broken = is_broken(hidden)


def is_broken(hidden: Tensor) -> Tensor:
    """Return whether each token of hidden [tokens, hidden] has NaN or infinity: bool [tokens]."""
    return ~hidden.sum(dim=1, dtype=torch.float32).isfinite()  # a sum is not finite if one number is not


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of a forward pass over the tokens of one step."""

    token_ids: Tensor
    """int64 [tokens]: ids of the tokens of all requests."""
    positions: Tensor
    """int64 [tokens]: position of each token in its context."""
    caches: Sequence[AnyCache]
    """One cache for each layer of the model."""
    batch: AttentionBatch
    layers: int | None = None
    """Index of the layer after the last one to run; None runs all layers from `begin` on."""
    taps: Taps | None = None
    """Receives the hidden states of all tokens after chosen layers. A whole model also sets `Taps.broken`.
    """
    begin: int = 0
    """Index of the first layer to run; 0 for a whole model."""
    further: Sequence[Tensor] = ()
    """[tokens, ...] each: other inputs of the layers, for a part of a model (`paceline.models.base.Architecture`).
    Empty for a whole model.
    """

    @property
    def depths(self) -> tuple[int, ...]:
        return self.taps.depths if self.taps is not None else ()

    @property
    def recording_key(self) -> tuple[object, ...]:
        """Everything that a recording of the pass depends on, apart from the number of tokens."""
        ends = [cache.first for cache in (self.caches[0], self.caches[-1])]
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in ends]
        codes = frozenset([cache.code for cache in self.caches])  # of all layers: a hybrid's ends may be states
        forms = [(tensor.shape[1:], tensor.dtype) for tensor in self.further]
        has_adapters = self.batch.adapters is not None
        return (self.layers, self.begin, self.depths, has_adapters, *forms, *places, codes)

    def keep_states(self, states: Sequence[Tensor]) -> None:
        """Give `taps` the states at its depths, in order."""
        if self.taps is not None:
            self.taps.states.update(zip(self.depths, states))


class Forward(Protocol):
    """The forward pass of an architecture (`paceline.models.base.Architecture`), as a function."""

    def __call__(self, inputs: ForwardInputs, /) -> Tensor: ...


def run_with_states(forward: Forward, inputs: ForwardInputs) -> list[Tensor]:
    """Return the result of a pass, then the states at the depths of its taps, in order. The taps themselves are not
    filled.
    """
    taps = Taps(inputs.depths)
    result = forward(replace(inputs, taps=taps))
    return [result, *(taps.states[depth] for depth in taps.depths)]


class HeadKernels(Protocol):
    """Operations on vectors of heads, for attention over latent vectors. A token's results depend on no other token."""

    def linear_heads(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Return x[:, h] @ weight[h].T for each head h: [tokens, heads, in] -> [tokens, heads, out].

        Args:
            weight: the packed form of a tensor [heads, out, in].
        """

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x [tokens, heads, n] and y [tokens, heads, m] as one tensor [tokens, heads, n + m]."""


class Kernels(AdapterKernels, EncoderKernels, ExpertKernels, HeadKernels, RecurrentKernels, Protocol):
    """The operations of a backend. Float tensors have the model's dtype unless said otherwise. Norms, softmax and
    rotation compute in fp32.
    """

    name: str
    packing: str
    """Name of the layout of packed matrices, as a part of file names; empty if `pack` leaves matrices as they are."""
    quantized_packing: str
    """Name of the layout, as `packing`, for a model whose matrices may be quantized."""

    @property
    def chooser(self) -> TokenChooser | None:
        """The chooser of tokens on the device; None if the host's sampler chooses them."""

    def take_turns(self, turns: Turns) -> None:
        """Let each later operation wait for its turn on the cores. Backends that cannot do this ignore the call: then a
        whole step is one turn.
        """

    def compile(self, forward: Forward) -> Forward:
        """Return a forward pass with the same results, which may avoid the cost of calling operations one by one.

        `forward` must compute with these kernels only (views are allowed), and the same way for any number of tokens.
        """

    def pack(self, weight: Tensor | QuantizedMatrix | QuantizedRows, allocate: Allocate | None = None) -> PackedWeight:
        """Pack a matrix [out, in], or the matrices of all heads [heads, out, in]. Models call this once, when they are
        loaded.

        A matrix on the meta device stays there. Matrices of heads stay in their dtype.
        A quantized matrix and its dequantized form give the same results.

        Args:
            allocate: called for the memory of the packed matrix if it needs any; None takes new memory.

        Raises:
            ConfigError: the backend has no kernels for the matrix.
        """

    def fits(self, weight: PackedWeight) -> bool:
        """Return whether data from a file is a packed matrix of this size, so that it is safe to compute with it."""

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """Return x [tokens, in] @ weight [out, in].T + bias: [tokens, out]."""

    def logits(self, x: Tensor, weight: PackedWeight) -> Logits:
        """Return x [rows, in] @ weight [vocab, in].T in fp32, without rounding to x's dtype."""

    def embed(self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        """Return rows of weight [vocab, hidden], times `scale` rounded to their dtype: [tokens, hidden].

        token_ids: int64 [tokens].
        """

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y for the residual stream; both have the same shape."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return x * factor, rounded to x's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded as `kind` says."""

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED
    ) -> tuple[Tensor, Tensor]:
        """Return x + y and the norm of this sum, with the bits of `add` and then `rms_norm`."""

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        scale: float = 1.0,
        growth: float = 0.0,
        growth_tokens: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles for `rotate`, fp32 [tokens, head_dim] each.

        Both are multiplied by scale * (1 + growth * log(1 + position // growth_tokens)). Dimensions with frequency 0
        are the exception: they are neither rotated nor multiplied.

        positions: int64 [tokens]; frequencies: fp32 [head_dim / 2], in radians per position.
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [tokens, heads, head_dim] by the half-split rotary embedding; cos, sin fp32 [tokens, head_dim]."""

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        """Write keys and values [tokens, kv_heads, head_dim] to the slots of their tokens.

        In a cache of latent vectors, keys and values share memory, so they must be equal.
        """

    def rotate_and_store(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        group: GroupTables,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Apply `rms_norm` to queries and keys if `norms` are given; `rotate` both; `store_kv`. Return the queries.

        The results have the same bits as these operations one by one.
        """

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: GroupTables,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        looks_ahead: bool = False,
        both_sides: bool = False,
    ) -> Tensor:
        """Return causal attention of queries [tokens, heads, head_dim] over their paged contexts, in the same shape.

        If `softcap` is not 0, scores become softcap * tanh(scores / softcap).

        Args:
            sinks: fp32 [heads]: a further score of each query, for a key whose value is 0.
            looks_ahead: whether queries see keys up to `batch.last_keys`, if the batch has it, instead of up to their
                own position.
            both_sides: whether a window also bounds the keys after a query, to as many as before it. Otherwise it
                bounds only the keys before a query.
        """

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, elementwise."""

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return gelu(gate) * up, elementwise, with gelu in its tanh form.

        Both are [tokens, size]. Rows of `up` may be apart from each other.
        """

    def sigmoid_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return sigmoid(gate) * up, elementwise."""
