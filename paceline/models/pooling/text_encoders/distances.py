"""Attention with a score for the distance of two tokens, as in MPNet (https://arxiv.org/abs/2004.09297)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from paceline.kernels.interface import ForwardInputs
from paceline.models.blocks import Linear
from paceline.models.rotary import Rotation

_MOST_DISTANCE = 128
"""Distances from this one on are in one class."""


def distance_buckets(length: int, buckets: int) -> Tensor:
    """Return the class of the distance from each query to each key of a text: int64 [length, length].

    One half of the classes is for keys after the query. Small distances have classes of their own; larger ones share
    classes whose sizes grow in proportion to the distance.
    """
    places = torch.arange(length)
    behind = places[:, None] - places[None, :]
    half = buckets // 2
    exact, distance = half // 2, behind.abs()
    steps = torch.log(distance.float() / exact) / math.log(_MOST_DISTANCE / exact) * (half - exact)
    far = (exact + steps.to(torch.int64)).clamp_(max=half - 1)
    return (behind < 0) * half + torch.where(distance < exact, distance, far)


class DistanceAttention:
    """Attention of each token to all tokens of its text.

    Texts are computed one after another, because the kernels know no scores of distances. So a text's result depends on
    no other text.

    Args:
        q, k, v: the projections of [tokens, hidden].
        output: the projection after attention.
        scores: fp32 [buckets, heads]: the score of each class of distances.
    """

    def __init__(
        self, q: Linear, k: Linear, v: Linear, output: Linear, heads: int, head_dim: int, scores: Tensor
    ) -> None:
        self._q, self._k, self._v, self._output = q, k, v, output
        self._heads, self._head_dim, self._scores = heads, head_dim, scores

    def __call__(self, x: Tensor, inputs: ForwardInputs, rotation: Rotation | None) -> Tensor:
        queries, keys, values = (
            each(x).view(-1, self._heads, self._head_dim).transpose(0, 1).float()
            for each in (self._q, self._k, self._v)
        )
        parts = []
        for start, end in pairwise(inputs.batch.query_start):
            # Copies, so that places in memory change nothing.
            q, k, v = (each[:, start:end].contiguous() for each in (queries, keys, values))
            classes = distance_buckets(end - start, len(self._scores)).to(x.device)
            scores = q @ k.transpose(1, 2) / self._head_dim**0.5 + self._scores[classes].permute(2, 0, 1)
            parts.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return self._output(torch.cat(parts).to(x.dtype))
