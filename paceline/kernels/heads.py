"""The interface of attention over latent vectors to the code that computes, as a part of `Kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.interface import PackedWeight


class HeadKernels(Protocol):
    """Operations on vectors of heads. A token's results do not depend on the batch."""

    def linear_heads(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Return x[:, h] @ weight[h].T for each head h: [tokens, heads, in] -> [tokens, heads, out].

        Args:
            weight: the packed form of a tensor [heads, out, in].
        """

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x [tokens, heads, n] and y [tokens, heads, m] as one tensor [tokens, heads, n + m]."""
