"""The interface between models and the code that computes. It names every hot operation once.

A backend is one class with the methods of `Kernels`: `ReferenceKernels` in plain torch, `NativeKernels` for CPUs, and
`TritonKernels` for GPUs. A model gets its backend from its caller and calls nothing else on its hot path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.turns import Turns
from paceline.kernels.experts import ExpertKernels
from paceline.kernels.heads import HeadKernels
from paceline.kernels.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Block tables and write positions of a step in one KV group."""

    block_tokens: int
    window: int
    """Tokens that a query attends to, itself included; 0 for all."""
    tables: Tensor
    """int32 [requests, blocks]: slot of each block. Entries outside [first needed, context_len) are arbitrary."""
    write_slots: Tensor
    """int64 [tokens]: slot to which each token of the step is written."""
    write_offsets: Tensor
    """int64 [tokens]: the token's position inside the block."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step: `requests` contexts, whose last few tokens are the queries.

    Tokens of a request are consecutive, in order of position. The KV of the queries is stored before attention runs.
    """

    query_start: tuple[int, ...]
    """[requests + 1]: tokens [query_start[r], query_start[r + 1]) belong to request r."""
    context_len: tuple[int, ...]
    """[requests]: tokens of each context, queries included."""
    groups: tuple[GroupTables, ...]
    final_len: tuple[int, ...] = field(default=(), kw_only=True)
    """[requests]: tokens at the front of each context that no later step takes back; empty if all queries are final.
    The tokens after them are drafts, or will be computed again. Only layers with a state read this."""

    def final_lengths(self) -> tuple[int, ...]:
        """Return [requests]: `final_len`, or `context_len` if all tokens are final."""
        return self.final_len or self.context_len

    def from_group(self, first: int) -> AttentionBatch:
        """Return the same batch for a model whose groups begin with group `first`."""
        return self if first == 0 else replace(self, groups=self.groups[first:])


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, views into the pool: [slots, kv_heads, block_tokens, head_dim].

    Latent vectors are keys and values at once, so both views show the same memory.
    """

    keys: Tensor
    values: Tensor

    @property
    def first(self) -> Tensor:
        """The tensor whose address and shape tell caches apart."""
        return self.keys


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one recurrent layer, in place of keys and values: fp32 views into the pool.

    A token reads the state after the token before it from that token's block, and writes to the block that it belongs
    to. So a full block never changes again.

    A step may begin before the end of an earlier step, because drafts were refused. Each part of a state can therefore
    go back by as many tokens as there may be drafts, but not to before `AttentionBatch.final_len`. A step needs nothing
    but the block of the token before it, so a block can be cached, moved or handed over at any time.
    """

    parts: tuple[Tensor, ...]
    """[slots, ...] each; all dimensions but the first are dense. The layer's kernels say what they hold."""

    @property
    def first(self) -> Tensor:
        return self.parts[0]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of a recurrence that can go back, such as Mamba-2's or a delta rule's: two parts of a `LayerState`.

    A block has the state after some of its tokens, and the inputs of the computed tokens after these. A step whose
    first token is at position p, in a context with `final` final tokens, does this for each request:

    1. It takes the state of the block of token p - 1, and advances it by the pending inputs of the tokens before p.
    2. It computes its tokens one after another. At the first token of a block, it puts the state before that token into
       the block.
    3. In the block, it advances the state only over final tokens. It leaves the block's state as it is if p > final.
    4. It adds the inputs of its other tokens to the pending inputs of their blocks. Inputs of refused tokens are
       overwritten by this, or never read.

    The advance by a pending input has the same bits as the first computation of this token.
    """

    state: Tensor
    """fp32 [slots, ...]"""
    pending: Tensor
    """fp32 [slots, 1 + drafts, inputs]: row 0 begins with the number of the block's tokens that `state` includes. Row
    i + 1 has the inputs of the i-th token after them. Kernels refuse a step for which there are too few rows."""


AnyCache = LayerCache | LayerState


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [size_out, size_in] in the layout that its backend reads fastest. Its source can be dropped."""

    data: Tensor
    """In the backend's own layout."""
    size_out: int
    size_in: int
    dtype: torch.dtype
    """The dtype in which kernels compute with it."""
    format: int | None = None
    """The backend's number for the layout of a quantized or compressed matrix; None for other matrices."""
    heads: int | None = None
    """Number of matrices, one for each head, for `linear_heads`; None for one matrix."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of the next token for some rows."""

    values: Tensor
    """fp32 [rows, vocab]"""
    best: Tensor | None = None
    """int64 [rows]: the first token with the largest logit of each row; None if the kernel has not found it."""


class NormKind(IntEnum):
    """How `Kernels.rms_norm` multiplies by its weight. Device code has these numbers, too."""

    ROUNDED = 0
    """x / RMS is rounded to x's dtype, and multiplied in it (Llama)."""
    UNIT_OFFSET = 1
    """The factor is 1 + weight, and all is in fp32 (Gemma 1 to 3)."""
    WIDE = 2
    """The factor is the weight, and all is in fp32 (Gemma 4, GPT-OSS)."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] and options of the norms of queries and keys over each head; see `Kernels.rms_norm`."""

    queries: Tensor
    keys: Tensor
    eps: float
    kind: NormKind


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters of a token that depends only on them and on its row of logits; see `SamplingParams`."""

    temperature: float
    """0 chooses the token with the largest logit."""
    top_k: int
    min_p: float
    top_p: float
    seed: int
    position: int
    """Position of the token to choose. The random number depends on the seed and this position only."""


class TokenChooser(Protocol):
    """Chooses tokens on the device of the logits, for many rows in one call, exactly as the host's sampler would."""

    def choose(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tensor:
        """Choose a token for each of these rows of logits, fp32 [n, vocab]. Return int64 [rows]."""

    def accept(self, tokens: Tensor, drafts: Tensor, first_rows: Sequence[int]) -> Tensor:
        """Verify drafts strictly: accept a draft if it and all drafts before it equal the chosen tokens.

        Args:
            tokens: int64 [rows]: the token chosen for each row.
            drafts: int64 [rows]: the input token of each row. The first row of a request is not a draft.
            first_rows: [requests + 1]: rows [first_rows[r], first_rows[r + 1]) belong to request r.

        Returns:
            int64 [requests, width]: the accepted drafts, the token chosen after them, then -1.
        """


@dataclass(slots=True)
class Taps:
    """Hidden states that a forward pass keeps, for drafters that were trained on them."""

    depths: tuple[int, ...] = ()
    """Numbers of layers after which states are taken; 0 is the embedding."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """[tokens, hidden] for each depth, as the next layer receives it."""

    def see(self, depth: int, x: Tensor) -> None:
        """Keep the states after `depth` layers, if they are wanted."""
        if depth in self.depths:
            self.states[depth] = x


class Forward(Protocol):
    """The forward pass of an architecture; see `paceline.models.base.Architecture`."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
        begin: int = 0,
        inputs: Sequence[Tensor] = (),
    ) -> Tensor: ...


class Kernels(ExpertKernels, HeadKernels, Protocol):
    """All float tensors have the model's dtype unless said otherwise; norms, softmax and rotation compute in fp32."""

    name: str
    packing: str
    """Identifies the layout of packed matrices, as part of a file's name; empty if matrices stay as they are."""

    @property
    def chooser(self) -> TokenChooser | None:
        """The chooser of tokens; None if the host chooses them."""

    compiles_states: bool
    """Whether `compile` accepts forward passes with `causal_conv` and recurrences."""

    def take_turns(self, turns: Turns) -> None:
        """Let each later operation wait for its turn, if these kernels can. With others, a whole step is one turn."""

    def compile(self, forward: Forward) -> Forward:
        """Return the same forward pass, perhaps without the cost of calling its operations one by one.

        `forward` must compute with these kernels only (views are allowed), and the same way for any number of tokens.
        """

    def pack(self, weight: Tensor | QuantizedMatrix) -> PackedWeight:
        """Pack a matrix [out, in], or those of all heads [heads, out, in], once, when a model is loaded.

        A matrix on the meta device stays there. Matrices of heads stay in their dtype.
        A quantized matrix and its dequantized form give the same results. Raises ConfigError if the backend has no
        kernels for the matrix.
        """

    def fits(self, weight: PackedWeight) -> bool:
        """Return whether data from a file is a packed matrix of this size, so that it is safe to compute with it."""

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """Return x [tokens, in] @ weight [out, in].T + bias: [tokens, out]."""

    def logits(self, x: Tensor, weight: PackedWeight) -> Logits:
        """Return the result of `linear` as fp32."""

    def embed(self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        """Return rows of weight [vocab, hidden], times `scale` rounded to their dtype: [tokens, hidden].

        token_ids: int64 [tokens].
        """

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y, both of one shape, for the residual stream."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return x * factor, rounded to x's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension; `kind` says how it is rounded."""

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

        Both are multiplied by scale * (1 + growth * log(1 + position // growth_tokens)).

        positions: int64 [tokens]; frequencies: fp32 [head_dim / 2], in radians per position.
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [tokens, heads, head_dim] by the half-split rotary embedding; cos, sin fp32 [tokens, head_dim]."""

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        """Write keys and values [tokens, kv_heads, head_dim] to the slots of their tokens.

        In a cache of latent vectors both have the same place, so they must be equal.
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

        The results have the bits of these operations one by one.
        """

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: GroupTables,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return causal attention of queries [tokens, heads, head_dim] over their paged contexts, in the same shape.

        softcap 0 is off; otherwise scores become softcap * tanh(scores / softcap).

        Args:
            sinks: fp32 [heads]: a further score of each query, for a key whose value is 0.
        """

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, elementwise."""

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return gelu(gate) * up, elementwise, with gelu in its tanh form.

        Both are [tokens, size]. Rows of `up` may be apart from each other.
        """

    def sigmoid_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return sigmoid(gate) * up, elementwise."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        """Return silu of each channel's convolution over its own last inputs: x [tokens, channels] -> same shape.

        Inputs before the context's first token are 0. A token's result depends on its own context only. The state can
        go back because it keeps more inputs than the next token needs.

        Args:
            weight: [taps, channels]; the last tap is the token's own.
            bias: [channels].
            state: fp32 [slots, taps - 1 + drafts, channels], a part of `LayerState`: the last inputs. The input of
                position p is in row p % (taps - 1 + drafts).
        """

    def selective_scan(
        self,
        x: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        """Return the outputs of Mamba-2's recurrence, [tokens, heads * head_dim], computed token by token in fp32:

            step  = softplus(time_steps + bias)
            state = exp(step * decay) * state + step * input (outer) B
            out   = state @ C + skip * input

        A token's result depends on its own context only. (Dao and Gu 2024, https://arxiv.org/abs/2405.21060.)

        Args:
            x: [tokens, heads * head_dim + 2 * state_size]: the inputs of all heads, then B and C, which they share.
            time_steps: [tokens, heads].
            rates: fp32 [3, heads]: decay (negative), bias and skip.
            state: of shape [heads, head_dim, state_size]. The pending inputs of a token are its x and its time steps.
        """

    def gated_delta_rule(
        self,
        x: Tensor,
        gates: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        """Return the outputs of the gated delta rule, [tokens, heads * value_dim], computed token by token in fp32:

            step  = softplus(time_steps + bias)
            state = exp(step * decay) * state
            state = state + key (outer) (sigmoid(gates) * (value - key @ state))
            out   = query @ state

        Each query and key x becomes x / sqrt(sum(x^2) + 1e-6) first. A query is also divided by sqrt(key_dim). Heads
        share queries and keys as query heads share keys in grouped-query attention. A token's result depends on its
        own context only. (Yang et al. 2024, https://arxiv.org/abs/2412.06464.)

        Args:
            x: [tokens, 2 * key_heads * key_dim + heads * value_dim]: the queries, keys and values of all heads.
            gates, time_steps: [tokens, heads].
            rates: fp32 [2, heads]: decay (negative) and bias.
            state: of shape [heads, key_dim, value_dim]. The pending inputs of a token are its x, gates and time steps.
        """


def view_pool(
    arena: Tensor, slot_elements: int, layers: int, kv_heads: int, block_tokens: int, head_dim: int, planes: int = 2
) -> list[LayerCache]:
    """Return the caches of one group's layers as views into the pool.

    Args:
        arena: the pool, flat, [slots * slot_elements] in the cache's dtype.
        planes: 2 for keys and values; 1 if each key is a value too.
    """
    slots = arena.numel() // slot_elements
    plane = kv_heads * block_tokens * head_dim
    strides = (slot_elements, block_tokens * head_dim, head_dim, 1)
    shape = (slots, kv_heads, block_tokens, head_dim)

    def plane_view(index: int) -> Tensor:
        return torch.as_strided(arena, shape, strides, storage_offset=arena.storage_offset() + index * plane)

    views = [plane_view(index) for index in range(planes * layers)]
    return [LayerCache(keys, values) for keys, values in zip(views[::planes], views[planes - 1 :: planes])]


def view_states(arena: Tensor, slot_bytes: int, layers: int, parts: Sequence[Sequence[int]]) -> list[LayerState]:
    """Return the states of one group's layers as views into the pool.

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
