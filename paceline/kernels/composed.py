"""Defaults for the optional parts of a `Kernels` backend: fused operations as sequences of simple operations,
operations of adapters and encoders in plain torch, no chooser of tokens, and no check of packed matrices.
"""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.adapters import TorchAdapters
from paceline.kernels.batch import GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.choosing import TokenChooser
from paceline.kernels.encoding import TorchEncoding
from paceline.kernels.interface import HeadNorms, Kernels, Logits, NormKind
from paceline.kernels.packed_weight import PackedWeight


class Composed(TorchAdapters, TorchEncoding):
    """Base class with the fused operations. A backend with kernels for them computes the same bits in fewer passes."""

    compiles_states = False

    @property
    def chooser(self) -> TokenChooser | None:
        return None

    def fits(self, weight: PackedWeight) -> bool:
        return True

    def logits(self: Kernels, x: Tensor, weight: PackedWeight) -> Logits:
        return Logits(self.linear(x, weight).float())

    def add_rms_norm(
        self: Kernels, x: Tensor, y: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED
    ) -> tuple[Tensor, Tensor]:
        total = self.add(x, y)
        return total, self.rms_norm(total, weight, eps, kind)

    def rotate_and_store(
        self: Kernels,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        group: GroupTables,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        if norms is not None:
            queries = self.rms_norm(queries, norms.queries, norms.eps, norms.kind)
            keys = self.rms_norm(keys, norms.keys, norms.eps, norms.kind)
        queries, keys = self.rotate(queries, cos, sin), self.rotate(keys, cos, sin)
        self.store_kv(keys, values, cache, group)
        return queries
