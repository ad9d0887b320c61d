"""Orders of a matrix's rows, for checkpoints whose projections are not in the order in which kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from paceline.models.model_config import AttentionConfig
from paceline.models.rotary import rotary_order


def order_by_part(groups: int, sizes: Sequence[int]) -> list[int]:
    """Return the order that puts all groups' first parts first, then their second parts, and so on.

    Args:
        sizes: the size of each part of a group. Groups follow each other, and so do the parts of a group.
    """
    ends = list(accumulate(sizes))
    starts = [group * ends[-1] for group in range(groups)]
    return [start + i for end, size in zip(ends, sizes) for start in starts for i in range(end - size, end)]


def gated_order(attention: AttentionConfig) -> list[int]:
    """Return the order in which a projection gives all heads' queries, then their gates. The checkpoint has the queries
    and gates of each head in turn."""
    order = order_by_part(attention.num_heads, (attention.head_dim, attention.head_dim))
    size = attention.num_heads * attention.head_dim
    rotated = rotary_order(attention.rope, attention.num_heads, attention.head_dim) or range(size)
    return [*(order[place] for place in rotated), *order[size:]]
