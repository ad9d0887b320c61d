"""The adapters of one model: those in the slots of its device, and the reading of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from paceline.core.adapters import read_adapter_files
from paceline.core.errors import ModelError
from paceline.kernels.adapters import AdapterTable
from paceline.kernels.interface import Kernels
from paceline.models.adapters.base_weights import BaseWeights
from paceline.models.adapters.linears import LayerAdapters, NamedLinear, PassAdapters
from paceline.models.adapters.loading import AdapterRules, LoadedAdapter, load_adapter, most_adapter_bytes


class ModelAdapters:
    """The slots for adapters of a model, whose linear layers then read them.

    Args:
        linears: the model's linear layers.
        slots: largest number of adapters in one batch.
        dtype: dtype of adapters in memory.
    """

    def __init__(
        self,
        linears: Sequence[NamedLinear],
        slots: int,
        rules: AdapterRules,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.slots = slots
        self.passing = PassAdapters()
        self.linears = tuple(linears)
        self._rules = rules
        self._base = BaseWeights(kernels)
        self._dtype = dtype
        self._known: WeakValueDictionary[bytes, LoadedAdapter] = WeakValueDictionary()
        """Adapters by their digests, while a request, a slot or the worker keeps them."""
        self._placed: list[LoadedAdapter | None] = [None] * slots
        self._table = AdapterTable(len(linears), slots, dtype, device)
        for named, layer in zip(linears, self._table.layers):
            named.linear.adapters = LayerAdapters(layer, self.passing, kernels)

    def read(self, folder: Path, digest: bytes = b"") -> LoadedAdapter:
        """Read an adapter into memory. Any thread may call this.

        Args:
            digest: the digest that the content must have; empty for any.

        Raises ModelError if it cannot be served, or if its content is not the expected one.
        """
        files = read_adapter_files(folder, most_adapter_bytes(self.linears, self._rules.most_rank))
        if digest and files.digest != digest:
            raise ModelError(f"the adapter in {folder} has changed since it was named; load it again")
        try:
            adapter = load_adapter(files, self.linears, self._dtype, self._rules, self._base)
        except ModelError as error:
            raise ModelError(f"the adapter in {folder} cannot be served: {error}") from error
        # Equal content may be there already, and somebody may keep that object only.
        return self._known.setdefault(adapter.digest, adapter)

    def place(self, slot: int, digest: bytes) -> None:
        """Put an adapter that was read, and that somebody still keeps, into a slot. No pass may run meanwhile."""
        adapter = self._placed[slot] = self._known[digest]
        self._table.place(slot, adapter.parts)
