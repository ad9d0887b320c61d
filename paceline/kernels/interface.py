"""The seam between models and the code that computes. Every hot operation is named here once.

A backend is one class with these methods: `ReferenceKernels` in plain torch; native CPU and Triton backends take its
place. Models receive a backend from their maker and call nothing else on their hot path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.turns import Turns
from paceline.kernels.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where one KV group keeps the contexts of a step."""

    block_tokens: int
    window: int
    """0 sees all."""
    tables: Tensor
    """int32 [requests, blocks]: slot of each block; what lies outside [first needed, context_len) is arbitrary."""
    write_slots: Tensor
    """int64 [tokens]: slot that takes each token of the step."""
    write_offsets: Tensor
    """int64 [tokens]: its place inside the block."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step: `requests` contexts, of each the last few tokens are queries.

    Tokens of a request are consecutive, in order of position. The KV of a query is stored before it is attended to.
    """

    query_start: tuple[int, ...]
    """[requests + 1]: tokens [query_start[r], query_start[r + 1]) belong to request r."""
    context_len: tuple[int, ...]
    """[requests]: tokens of each context, queries included."""
    groups: tuple[GroupTables, ...]

    def from_group(self, first: int) -> AttentionBatch:
        """The same batch for a model whose groups begin with this one."""
        return self if first == 0 else replace(self, groups=self.groups[first:])


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, views into the pool: [slots, kv_heads, block_tokens, head_dim]."""

    keys: Tensor
    values: Tensor

    @property
    def first(self) -> Tensor:
        """What tells caches of different places or shapes apart."""
        return self.keys


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one recurrent layer keeps of contexts, in place of keys and values: fp32 views into the pool.

    A block holds the state behind the last of its tokens that was computed. A token reads the state behind the token
    before it, and leaves its own in the block that it belongs to itself: a block that is full never changes again.
    """

    parts: tuple[Tensor, ...]
    """[slots, ...] each, dense behind the first dimension."""

    @property
    def first(self) -> Tensor:
        return self.parts[0]


AnyCache = LayerCache | LayerState


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [size_out, size_in] in the form that its backend reads fastest; what made it can be dropped."""

    data: Tensor
    """In the backend's own layout."""
    size_out: int
    size_in: int
    dtype: torch.dtype
    """That it is computed in."""
    format: int | None = None
    """The backend's name for the layout of a matrix that is quantized or compressed."""


@dataclass(frozen=True, slots=True)
class Logits:
    """How likely each token is behind some others."""

    values: Tensor
    """fp32 [rows, vocab]"""
    best: Tensor | None = None
    """int64 [rows]: the first of the largest of each row, where it was found on the way."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and keys over each head, as `Kernels.rms_norm` takes them; weights [head_dim]."""

    queries: Tensor
    keys: Tensor
    eps: float
    unit_offset: bool


@dataclass(frozen=True, slots=True)
class Draw:
    """How a token is chosen from one row of logits that nothing else has a say in; see `SamplingParams`."""

    temperature: float
    """0 takes the best."""
    top_k: int
    min_p: float
    top_p: float
    seed: int
    position: int
    """Of the token to choose; with the seed it is what the random number follows from."""


class TokenChooser(Protocol):
    """Chooses tokens where the logits are, of many rows in one call. The tokens are those of the host's sampler."""

    def choose(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tensor:
        """One token of each of these rows of fp32 [n, vocab] -> int64 [rows]."""

    def accept(self, tokens: Tensor, drafts: Tensor, first_rows: Sequence[int]) -> Tensor:
        """Strict verification: a draft is accepted as long as each so far is what was chosen.

        Args:
            tokens: int64 [rows]: what each row chose.
            drafts: int64 [rows]: the token that each row stood behind; of a request's rows the first is no draft.
            first_rows: [requests + 1]: rows [first_rows[r], first_rows[r + 1]) are those of request r.

        Returns:
            int64 [requests, most rows]: the accepted drafts and the token behind them, then -1.
        """


@dataclass(slots=True)
class Taps:
    """Hidden states that a forward pass shows, for drafters that were trained on them."""

    depths: tuple[int, ...] = ()
    """Numbers of layers after which states are taken; 0 is the embedding."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """[tokens, hidden] for each depth, as the next layer receives it."""

    def see(self, depth: int, x: Tensor) -> None:
        """Keep the states after `depth` layers, if they are wanted."""
        if depth in self.depths:
            self.states[depth] = x


class Forward(Protocol):
    """A model's forward pass; see `paceline.models.base.Model`."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor: ...


class Kernels(Protocol):
    """All float tensors have the model's dtype unless said otherwise; norms, softmax and rotation compute in fp32."""

    name: str
    packing: str
    """What the form of packed matrices follows from, as part of a file's name; empty where they stay as they are."""

    @property
    def chooser(self) -> TokenChooser | None:
        """None where the host chooses tokens."""

    compiles_states: bool
    """Whether `compile` takes passes with `causal_conv` and `selective_scan`."""

    def take_turns(self, turns: Turns) -> None:
        """From now on each operation waits for its turn, where these kernels can; others compute whole steps in one."""

    def compile(self, forward: Forward) -> Forward:
        """The same pass, perhaps without the cost of calling its operations one by one.

        `forward` must compute with these kernels alone (views are free), and the same way for any number of tokens.
        """

    def pack(self, weight: Tensor | QuantizedMatrix) -> PackedWeight:
        """Takes in a matrix [out, in], once, when a model is loaded. On the meta device it stays as it is.

        Results are the same for a quantized matrix and for what it dequantizes to. Raises ConfigError where the
        backend has no such kernels.
        """

    def fits(self, weight: PackedWeight) -> bool:
        """Whether data from a file is a packed matrix of this size, so that it is safe to compute with it."""

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] @ weight [out, in].T + bias -> [tokens, out]."""

    def logits(self, x: Tensor, weight: PackedWeight) -> Logits:
        """`linear`, then fp32."""

    def embed(self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        """Rows of weight [vocab, hidden] -> [tokens, hidden], times the scale rounded to their dtype.

        token_ids: int64 [tokens].
        """

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y of one shape: the residual stream."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor, rounded to x's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension; with unit_offset * (1 + weight), all in fp32
        (Gemma), without it the product is taken in x's dtype (Llama)."""

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x + y, and its norm: `add`, then `rms_norm`, with their bits."""

    def rotation(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles that `rotate` takes, fp32 [tokens, head_dim] each.

        positions: int64 [tokens]; frequencies: fp32 [head_dim / 2], radians a position.
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding (half-split form): x [tokens, heads, head_dim]; cos, sin fp32 [tokens, head_dim]."""

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        """Writes keys and values [tokens, kv_heads, head_dim] to their slots."""

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
        """`rms_norm` of queries and keys by `norms`, where there are any; `rotate` of both; `store_kv` -> queries.

        With the bits of these operations one by one.
        """

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: GroupTables,
        scale: float,
        softcap: float,
    ) -> Tensor:
        """Causal attention of queries [tokens, heads, head_dim] over their paged contexts -> same shape.

        softcap 0 is off; otherwise scores become softcap * tanh(scores / softcap).
        """

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, elementwise."""

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate), tanh form, * up, elementwise."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        """silu of each channel's convolution with its own last inputs, that before the context's first token being 0:
        x [tokens, channels] -> same shape. Each token's result depends on its own context alone.

        Args:
            weight: [taps, channels]; the last tap is the token's own.
            bias: [channels].
            state: fp32 [slots, taps - 1, channels], a part of `LayerState`: the last inputs.
        """

    def selective_scan(
        self, x: Tensor, time_steps: Tensor, rates: Tensor, state: Tensor, batch: AttentionBatch, group: GroupTables
    ) -> Tensor:
        """The recurrence of Mamba-2 -> [tokens, heads * head_dim], token by token in fp32:

            step  = softplus(time_steps + bias)
            state = exp(step * decay) * state + step * input (outer) B
            out   = state @ C + skip * input

        Each token's result depends on its own context alone. (Dao and Gu 2024, https://arxiv.org/abs/2405.21060.)

        Args:
            x: [tokens, heads * head_dim + 2 * state_size]: the inputs of all heads, then B and C, which they share.
            time_steps: [tokens, heads].
            rates: fp32 [3, heads]: decay, which is negative, bias and skip.
            state: fp32 [slots, heads, head_dim, state_size], a part of `LayerState`.
        """


def view_pool(
    arena: Tensor, slot_elements: int, layers: int, kv_heads: int, block_tokens: int, head_dim: int
) -> list[LayerCache]:
    """The caches of one group's layers as views into the pool.

    Args:
        arena: [slots * slot_elements], flat, of the cache's dtype.
    """
    slots = arena.numel() // slot_elements
    plane = kv_heads * block_tokens * head_dim
    strides = (slot_elements, block_tokens * head_dim, head_dim, 1)
    shape = (slots, kv_heads, block_tokens, head_dim)

    def plane_view(index: int) -> Tensor:
        return torch.as_strided(arena, shape, strides, storage_offset=arena.storage_offset() + index * plane)

    return [LayerCache(plane_view(2 * layer), plane_view(2 * layer + 1)) for layer in range(layers)]


def view_states(arena: Tensor, slot_bytes: int, layers: int, parts: Sequence[Sequence[int]]) -> list[LayerState]:
    """The states of one group's layers as views into the pool.

    Args:
        arena: the pool, flat, of any dtype.
        parts: the shape of each part of a layer's state.
    """
    words = arena.view(torch.uint8).view(torch.float32)
    slot_elements = slot_bytes // words.itemsize
    slots = words.numel() // slot_elements
    place = words.storage_offset()

    def take(shape: Sequence[int]) -> Tensor:
        nonlocal place
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        part = torch.as_strided(words, (slots, *shape), (slot_elements, *strides), place)
        place += math.prod(shape)
        return part

    return [LayerState(tuple(take(shape) for shape in parts)) for _ in range(layers)]
