"""The interface of encoders of text, and a pass over many texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.kernels.transfer import to_device
from paceline.models.text_encoder_config import TextEncoderConfig

_BLOCK = 32
"""Number of tokens of a block. Each input begins with a block of its own."""
_LEAST_BLOCKS = 32


class TextEncoder(Protocol):
    """An encoder of text with its weights. Kernels may compile its forward pass."""

    config: TextEncoderConfig

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Return the hidden states of all tokens, [tokens, hidden].

        `inputs.further` are the rows of the tables of positions and of token types, int64 [tokens] each.
        `inputs.batch.groups` are the one for layers that see all tokens, and the one for layers with a window.
        """


class Encode(Protocol):
    """Makes hidden states of the tokens of texts."""

    vocab_size: int
    types: int
    """Number of types of tokens."""

    def __call__(
        self, token_ids: Tensor, type_ids: Tensor, lengths: Sequence[int], seen: Sequence[int] | None = None
    ) -> Tensor:
        """Return the hidden states [tokens, hidden] of texts that follow each other.

        Args:
            token_ids, type_ids: int64 [tokens], on the CPU.
            lengths: number of tokens of each text, at least 1.
            seen: number of the first tokens of each text to which its tokens attend; None for all.
        """


class TextPass:
    """An `Encode` that computes the hidden states of many texts in one pass without padding.

    Keys and values of one layer at a time are in a cache of this process, which every layer uses anew. A text's hidden
    states depend on no other text of the pass.

    Args:
        dtype: dtype of keys and values.
    """

    def __init__(self, encoder: TextEncoder, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> None:
        self.config = encoder.config
        self.vocab_size, self.types = encoder.config.vocab_size, encoder.config.types
        self._device, self._dtype = device, dtype
        # Recorded passes have operations of the kernels alone.
        self._forward = encoder.forward if self.config.distance_buckets else kernels.compile(encoder.forward)
        self._cache: LayerCache | None = None
        self._blocks = 0

    def __call__(
        self, token_ids: Tensor, type_ids: Tensor, lengths: Sequence[int], seen: Sequence[int] | None = None
    ) -> Tensor:
        config = self.config
        places = _Places.of(lengths, lengths if seen is None else seen)
        windows = (0, config.window) if config.window else (0,)
        device = self._device
        tables, slots, offsets, last_keys, positions = (
            to_device(each, device)
            for each in (places.tables, places.slots, places.offsets, places.last_keys, places.positions)
        )
        groups = tuple(GroupTables(_BLOCK, window, tables, slots, offsets) for window in windows)
        batch = AttentionBatch(places.starts, tuple(lengths), groups, last_keys=last_keys)
        further = (positions + config.first_position, to_device(type_ids, device))
        caches = (self._cache_of(places.blocks),)
        inputs = ForwardInputs(to_device(token_ids, device), positions, caches, batch, further=further)
        return self._forward(inputs)

    def _cache_of(self, blocks: int) -> LayerCache:
        """Return a cache with room for at least this many blocks."""
        if self._cache is None or blocks > self._blocks:
            config = self.config
            self._blocks = max(_LEAST_BLOCKS, 1 << (blocks - 1).bit_length())
            shape = (2, self._blocks, config.heads, _BLOCK, config.head_dim)
            keys, values = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._cache = LayerCache(keys, values)
        return self._cache


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tokens of some texts are: in their texts, and in blocks."""

    starts: tuple[int, ...]
    """[texts + 1]: index of the first token of each text, and of the end."""
    blocks: int
    """Number of blocks of all texts."""
    tables: Tensor
    """int32 [texts, blocks]: the block of each part of a text."""
    positions: Tensor
    """int64 [tokens]: index of each token in its text."""
    last_keys: Tensor
    """int64 [tokens]: index of the last token of the same text to which others attend."""
    slots: Tensor
    """int64 [tokens]: block of each token."""
    offsets: Tensor
    """int64 [tokens]: index of each token in its block."""

    @classmethod
    def of(cls, lengths: Sequence[int], seen: Sequence[int]) -> _Places:
        sizes = torch.tensor(lengths, dtype=torch.int64)
        ends = sizes.cumsum(0)
        counts = (sizes + _BLOCK - 1) // _BLOCK
        first_blocks = counts.cumsum(0) - counts
        most = int(counts.max())
        blocks = int(counts.sum())
        # Entries after the last block of a text are never read.
        tables = (first_blocks[:, None] + torch.arange(most)).clamp_(max=blocks - 1).to(torch.int32)
        text = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        positions = torch.arange(int(ends[-1])) - (ends - sizes)[text]
        return cls(
            (0, *ends.tolist()),
            blocks,
            tables,
            positions,
            (torch.tensor(seen, dtype=torch.int64) - 1)[text],
            first_blocks[text] + positions // _BLOCK,
            positions % _BLOCK,
        )
