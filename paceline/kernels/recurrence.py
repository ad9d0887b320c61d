"""The part of `Kernels` with the operations of layers with a state."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import RecurrentState


class RecurrentKernels(Protocol):
    """Operations of layers with a state. A token's results depend on its own context only."""

    compiles_states: bool
    """Whether `compile` accepts forward passes with these operations."""

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

        Inputs before the context's first token count as 0. A token's result depends on its own context only. The state
        keeps more inputs than the next token needs, so that it can go back after refused drafts.

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
