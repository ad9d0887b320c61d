"""Attention of each row to itself and a few rows before it, with learned embeddings of the distance, in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_ROWS = 10_000.0
"""Rows in which the slowest angle of `distance_embeddings` turns by one radian."""


def distance_embeddings(count: int, size: int) -> Tensor:
    """Return sines and then cosines of the distances 0 to count - 1, with `size` / 2 speeds: fp32 [count, size]."""
    speeds = torch.exp(torch.arange(size // 2) * -(math.log(_MOST_ROWS) / max(size // 2 - 1, 1)))
    angles = torch.arange(count).unsqueeze(1) * speeds
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def attend_locally(queries: Tensor, keys: Tensor, values: Tensor, distances: Tensor, cap: float) -> Tensor:
    """Return attention over the window of each row. The scores are cap * tanh(query @ (key + distance) / cap).

    Rows are computed in blocks of a window. A block sees its own rows and the window - 1 rows before them.

    Args:
        queries, keys, values: fp32 [rows, heads, head_dim].
        distances: fp32 [window, heads, head_dim]: a vector for each distance from a query back to a key.

    Returns:
        fp32 [rows, heads, head_dim].
    """
    rows, window = len(queries), len(distances)
    blocks, before = -(-rows // window), window - 1
    after = blocks * window - rows

    def around(x: Tensor) -> Tensor:
        """Return the rows that each block sees: [blocks, heads, before + window, head_dim]."""
        return F.pad(x, (0, 0, 0, 0, before, after)).unfold(0, before + window, window).transpose(2, 3)

    block_queries = F.pad(queries, (0, 0, 0, 0, 0, after)).view(blocks, window, *queries.shape[1:]).transpose(1, 2)
    by_distance = block_queries @ distances.permute(1, 2, 0)  # [blocks, heads, window, window]
    row, column = (torch.arange(count, device=queries.device) for count in (window, before + window))
    distance = before + row.unsqueeze(1) - column
    at = distance.clamp(0, before).expand(blocks, block_queries.shape[1], -1, -1)
    scores = cap * torch.tanh((block_queries @ around(keys).mT + by_distance.gather(3, at)) / cap)
    is_seen = (distance >= 0) & (distance < window)
    exists = torch.arange(blocks, device=queries.device).unsqueeze(1) * window + column >= before
    scores = scores.masked_fill(~(is_seen & exists[:, None, None]), -math.inf)
    attended = torch.softmax(scores, dim=3) @ around(values)
    return attended.transpose(1, 2).flatten(0, 1)[:rows]
