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
    """cos and sin of a step's positions: fp32 [tokens, head_dim]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """The rotary embeddings of a model, one for each type of attention layer.

    Angles are computed from the positions without a table, so no position is too large.
    """

    def __init__(self, config: ModelConfig, device: torch.device, kernels: Kernels) -> None:
        self._kernels = kernels
        # Layer types often share one embedding, whose angles are then computed once.
        kinds = [(kind, (own.rope, own.head_dim)) for kind, own in config.attention.items() if own.rope is not None]
        self._places = {kind: list(dict(kinds).values()).index(key) for kind, key in kinds}
        self._frequencies = {
            self._places[kind]: inverse_frequencies(rope, head_dim).to(device) for kind, (rope, head_dim) in kinds
        }

    def __call__(self, positions: Tensor) -> Mapping[LayerType, Rotation]:
        """Return the angles of positions int64 [tokens], for each type of layer that rotates."""
        found = {place: Rotation(*self._kernels.rotation(positions, own)) for place, own in self._frequencies.items()}
        return {kind: found[place] for kind, place in self._places.items()}


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians that each pair of dimensions turns per position: fp32 [head_dim / 2].

    Pairs that are not rotated come last and have 0.
    """
    rotated = rope.rotated_dims or head_dim
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    return F.pad(_scaled(frequencies, rope), (0, (head_dim - rotated) // 2))


def _scaled(frequencies: Tensor, rope: Rope) -> Tensor:
    """Return frequencies for contexts that are longer than those that the model was first trained on.

    "llama3" keeps fast dimensions, slows slow ones down by `factor`, and interpolates between them (Llama 3.1).
    """
    if rope.kind == "default":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.kind == "linear":
        return slowed
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * slowed


def rotary_order(rope: Rope | None, heads: int, head_dim: int) -> Sequence[int] | None:
    """Return the order in which projections to queries and keys must have their rows; None for that of the checkpoint.

    Kernels rotate dimension i of a head together with dimension i + head_dim / 2. Some checkpoints pair neighbours, and
    some rotate only a head's first dimensions. Queries and keys in another order have the same products.
    """
    if rope is None or not (rope.interleaved or rope.rotated_dims):
        return None
    rotated = rope.rotated_dims or head_dim
    pairs = [(i, i + 1) if rope.interleaved else (i // 2, (i + rotated) // 2) for i in range(0, rotated, 2)]
    pairs += [(i, i + 1) for i in range(rotated, head_dim, 2)]
    own = [first for first, _ in pairs] + [second for _, second in pairs]
    return [head * head_dim + dim for head in range(heads) for dim in own]
