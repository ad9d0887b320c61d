"""Rotary embeddings: the angles of a step's positions, and the order of a head's dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.interface import Kernels
from paceline.models.model_config import LayerType, ModelConfig, Rope


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the angles at a step's positions: fp32 [tokens, head_dim] each."""

    cos: Tensor
    sin: Tensor
    of_queries: Rotation | None = None
    """The rotation of queries, if it differs from the rotation of keys; None if both are equal."""


class Rotary:
    """The rotary embeddings of a model, one for each type of attention layer.

    Angles are computed from the positions without a table, so no position is too large.
    """

    def __init__(self, config: ModelConfig, device: torch.device, kernels: Kernels) -> None:
        self._kernels = kernels
        self._ropes = {
            kind: (attention.rope, attention.rotary_dim)
            for kind, attention in config.attention.items()
            if attention.rope is not None
        }
        # Layer types often share one embedding, whose angles are then computed once.
        self._frequencies = {rope: inverse_frequencies(*rope).to(device) for rope in self._ropes.values()}

    def __call__(self, positions: Tensor) -> Mapping[LayerType, Rotation]:
        """Return the angles of positions int64 [tokens], for each type of layer that rotates."""
        found = {rope: self._rotation(positions, rope[0], each) for rope, each in self._frequencies.items()}
        return {kind: found[rope] for kind, rope in self._ropes.items()}

    def of_grids(self, positions: Tensor) -> Rotation:
        """Return the angles of tokens that have three positions, in a model with one rotary embedding.

        A token with three equal positions has the bits of the angles that `__call__` returns.

        Args:
            positions: int64 [3, tokens]: frames, rows and columns.
        """
        (((rope, size), frequencies),) = self._frequencies.items()
        tokens = positions.shape[1]
        turned_by = section_axes(rope, size // 2).repeat(2).to(positions.device).expand(1, tokens, size)
        angles = self._kernels.rotation(positions.flatten(), frequencies, rope.attention_factor)
        cos, sin = (axis_angles.view(3, tokens, size).gather(0, turned_by)[0] for axis_angles in angles)
        return Rotation(cos, sin)

    def _rotation(self, positions: Tensor, rope: Rope, frequencies: Tensor) -> Rotation:
        rotation, scale, growth = self._kernels.rotation, rope.attention_factor, rope.query_growth
        of_queries = None
        if growth:
            of_queries = Rotation(*rotation(positions, frequencies, scale, growth, rope.original_max_position))
        return Rotation(*rotation(positions, frequencies, scale), of_queries)


def section_axes(rope: Rope, pairs: int) -> Tensor:
    """Return which of a token's three positions turns each pair of dimensions, according to `Rope.sections`.

    The result is int64 [pairs]: 0 stands for the frame, 1 for the row, 2 for the column.
    """
    assert rope.sections is not None
    pair = torch.arange(pairs)
    axis = pair % 3
    return torch.where(pair < 3 * torch.tensor(rope.sections)[axis], axis, 0)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians that each pair of dimensions turns per position: fp32 [head_dim / 2].

    Pairs that are not rotated come last and have frequency 0.
    """
    proportional = rope.kind == "proportional"
    rotated = rope.rotated_dims if proportional else rope.rotated_dims or head_dim
    turned = head_dim if proportional else rotated
    spread = rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / turned)
    return F.pad(_scaled(spread, rope), (0, (head_dim - rotated) // 2))


def _scaled(spread: Tensor, rope: Rope) -> Tensor:
    """Return frequencies 1 / spread, scaled for contexts longer than those that the model was first trained on.

    "llama3" and "yarn" keep the frequencies of fast pairs of dimensions and divide the frequencies of slow pairs by
    `factor`. For pairs between these, "llama3" interpolates by frequency and "yarn" by the number of the pair.
    """
    frequencies = 1.0 / spread
    if rope.kind == "default":
        return frequencies
    if rope.kind == "yarn":
        kept = 1.0 - _yarn_slowing(rope, len(spread))
        return (1.0 / (rope.factor * spread)) * (1.0 - kept) + frequencies * kept
    slowed = frequencies / rope.factor
    if rope.kind in ("linear", "proportional"):
        return slowed
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * slowed


def _yarn_slowing(rope: Rope, pairs: int) -> Tensor:
    """Return how much YaRN slows each pair of dimensions down: from 0, not at all, to 1, by `factor`. fp32 [pairs]."""

    def pair_with(turns: float) -> float:
        """Return the number of the pair that makes this many turns within `original_max_position` tokens."""
        return pairs * math.log(rope.original_max_position / (turns * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001
    return ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)


def rotary_order(rope: Rope | None, heads: int, head_dim: int) -> Sequence[int] | None:
    """Return the order of rows that projections to queries and keys must have; None for the order of the checkpoint.

    Kernels rotate dimension i of a head together with dimension i + head_dim / 2. Some checkpoints pair neighbours, and
    some rotate only a head's first dimensions. Products of queries and keys do not change if both have the same new
    order. "proportional" needs no other order: it turns the first pairs (i, i + head_dim / 2).
    """
    if rope is None or rope.kind == "proportional" or not (rope.interleaved or rope.rotated_dims):
        return None
    rotated = rope.rotated_dims or head_dim
    pairs = [(i, i + 1) if rope.interleaved else (i // 2, (i + rotated) // 2) for i in range(0, rotated, 2)]
    pairs += [(i, i + 1) for i in range(rotated, head_dim, 2)]
    order = [first for first, _ in pairs] + [second for _, second in pairs]
    return [head * head_dim + dim for head in range(heads) for dim in order]
