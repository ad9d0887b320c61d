"""The vision tower of Qwen 3-VL: a transformer over patches, whose results are merged in squares.

The results of some layers are merged, too, and are further parts of a row of the encoding (deepstack,
https://arxiv.org/abs/2406.04334).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.kernels.encoding import Between
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Linear
from paceline.models.encoder_config import Qwen3VisionConfig
from paceline.models.encoders.blocks import LayerNorm, media_place
from paceline.models.encoders.patch_layer import PatchLayer
from paceline.models.encoders.pieces import Pieces
from paceline.models.model_config import Rope
from paceline.models.rotary import Rotation, inverse_frequencies

_EPS = 1e-6


class Qwen3Vision:
    """The encoder of images, and of frames that are encoded together. The patches of a square follow each other."""

    takes = torch.uint8

    def __init__(self, config: Qwen3VisionConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        size, side = config.hidden_size, config.patch_side
        place = media_place(weights, "pos_embed.weight", "visual")
        self._config = config
        # The checkpoint has a convolution, whose patches have colors first.
        shape = (size, 3, config.patch_frames, side, side)
        (weight,) = weights.take_packed_derived(f"{place}.patch_embed.proj.weight", shape, [colors_last])
        self._embed = Linear(weight, weights.take(f"{place}.patch_embed.proj.bias", size), kernels)
        self._dtype = weight.dtype
        self._positions = weights.take(f"{place}.pos_embed.weight", config.positions_side**2, size)
        self._layers = [_layer(config, weights, f"{place}.blocks.{layer}", kernels) for layer in range(config.layers)]
        merger = partial(_Merger, config, hidden_size, weights, kernels=kernels)
        self._merge = merger(f"{place}.merger")
        self._mergers = {
            layer: merger(f"{place}.deepstack_merger_list.{index}", norms_squares=True)
            for index, layer in enumerate(config.shown_layers)
        }
        # The first half of a head turns by the patch's row, and the second half by its column.
        self._frequencies = inverse_frequencies(Rope(config.rope_theta), size // config.heads // 2)
        self._kernels = kernels
        self._tower = kernels.compile_tower(self._run_layers)

    def rows(self, shape: Sequence[int]) -> int:
        config = self._config
        side, sizes = config.patch_side * config.merged_side, tuple(shape[-3:-1])
        known = [(*sizes, 3), (config.patch_frames, *sizes, 3)]
        if len(sizes) != 2 or tuple(shape) not in known or not all(size > 0 and size % side == 0 for size in sizes):
            raise InvalidRequestError(
                f"an image for this model must be [height, width, 3], and frames [{config.patch_frames}, height, "
                f"width, 3], with sides that are multiples of {side}, not {list(shape)}"
            )
        return sizes[0] // side * (sizes[1] // side)

    def encode(self, x: Tensor, between: Between) -> Tensor:
        config, pieces = self._config, Pieces(between, x.device)
        patches = cut_patches(x if x.dim() == 4 else x.expand(config.patch_frames, *x.shape), config.patch_side)
        rows, columns = patches.shape[:2]
        tiles = squares_of(patches, config.merged_side).flatten(1)
        grid = torch.cartesian_prod(torch.arange(rows, device=x.device), torch.arange(columns, device=x.device))
        places = squares_of(grid.view(rows, columns, 2), config.merged_side)
        (hidden,) = pieces.of(partial(self._embedded, table=self._table(rows, columns)), tiles, places)
        rotation = self._rotation(places)
        hidden, *shown = self._tower(hidden, rotation.cos, rotation.sin, between=between)
        parts = [self._mergers[number](hidden, pieces) for number, hidden in zip(sorted(self._mergers), shown)]
        return torch.cat([self._merge(hidden, pieces), *parts], dim=1)

    def _run_layers(self, hidden: Tensor, cos: Tensor, sin: Tensor, between: Between) -> tuple[Tensor, ...]:
        """Return the hidden states after all layers, and after each layer whose result the encoding shows, too."""
        pieces, shown = Pieces(between, hidden.device), []
        for number, layer in enumerate(self._layers):
            hidden = layer(hidden, cos, sin, pieces)
            if number in self._mergers:
                shown.append(hidden)
        return (hidden, *shown)

    def _embedded(self, tiles: Tensor, places: Tensor, table: _Table) -> tuple[Tensor]:
        pixels = tiles.float().div_(127.5).sub_(1.0)
        return (self._kernels.add(self._embed(pixels.to(self._dtype)), table.at(places).to(self._dtype)),)

    def _table(self, rows: int, columns: int) -> _Table:
        side = self._config.positions_side
        return _Table(self._positions.float().view(side, side, -1), rows, columns)

    def _rotation(self, places: Tensor) -> Rotation:
        angles = (places.unsqueeze(2) * self._frequencies.to(places.device)).flatten(1).repeat(1, 2)
        return Rotation(angles.cos(), angles.sin())


def _layer(config: Qwen3VisionConfig, weights: Weights, place: str, kernels: Kernels) -> PatchLayer:
    size, inner = config.hidden_size, config.inner_size
    mlp = (
        Linear.take(weights, f"{place}.mlp.linear_fc1", size, inner, True, kernels),
        Linear.take(weights, f"{place}.mlp.linear_fc2", inner, size, True, kernels),
    )
    return PatchLayer(size, config.heads, _EPS, weights, place, kernels, *mlp, kernels.gelu_tanh)


class _Merger:
    """A norm, and an MLP over squares of patches: [patches, size] -> [squares, text size].

    Args:
        norms_squares: whether the norm is over the patches of a square together.
    """

    def __init__(
        self,
        config: Qwen3VisionConfig,
        text_size: int,
        weights: Weights,
        place: str,
        kernels: Kernels,
        norms_squares: bool = False,
    ) -> None:
        self._patches = config.merged_side**2
        size = self._size = config.hidden_size * self._patches
        self._norms_squares = norms_squares
        self._norm = LayerNorm(weights, f"{place}.norm", size if norms_squares else config.hidden_size, _EPS, kernels)
        self._up = Linear.take(weights, f"{place}.linear_fc1", size, size, True, kernels)
        self._down = Linear.take(weights, f"{place}.linear_fc2", size, text_size, True, kernels)
        self._kernels = kernels

    def __call__(self, x: Tensor, pieces: Pieces) -> Tensor:
        (merged,) = pieces.of(self._merged, x.view(-1, self._size))
        return merged

    def _merged(self, squares: Tensor) -> tuple[Tensor]:
        if self._norms_squares:
            normed = self._norm(squares)
        else:
            normed = self._norm(squares.view(len(squares) * self._patches, -1)).view(squares.shape)
        return (self._down(self._kernels.gelu(self._up(normed))),)


def colors_last(weight: Tensor) -> Tensor:
    """Return a convolution's weight [out, 3, frames, rows, columns] as a matrix [out, frames * rows * columns * 3]."""
    return weight.permute(0, 2, 3, 4, 1).flatten(1)


def cut_patches(frames: Tensor, side: int) -> Tensor:
    """Return the patches of frames [frames, height, width, 3]: [rows, columns, frames, side, side, 3]."""
    count, height, width, colors = frames.shape
    return frames.reshape(count, height // side, side, width // side, side, colors).permute(1, 3, 0, 2, 4, 5)


def squares_of(grid: Tensor, side: int) -> Tensor:
    """Return the elements of a grid [rows, columns, ...] square by square: [rows * columns, ...]."""
    rows, columns, *rest = grid.shape
    return grid.reshape(rows // side, side, columns // side, side, *rest).transpose(1, 2).reshape(-1, *rest)


class _Table:
    """The position embeddings of an image's patches, interpolated linearly from a table of another size.

    Args:
        positions: fp32 [side, side, size].
        rows, columns: patches of the image.
    """

    def __init__(self, positions: Tensor, rows: int, columns: int) -> None:
        low, high, share = _neighbours(len(positions), rows, positions.device)
        self._rows = torch.lerp(positions[low], positions[high], share.view(-1, 1, 1))
        self._low, self._high, self._share = _neighbours(len(positions), columns, positions.device)

    def at(self, places: Tensor) -> Tensor:
        """Return the positions at rows and columns int64 [patches, 2]: fp32 [patches, size]."""
        row, column = places.unbind(1)
        low, high = (self._rows[row, neighbours[column]] for neighbours in (self._low, self._high))
        return torch.lerp(low, high, self._share[column].unsqueeze(1))


def _neighbours(size: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Spread `count` places evenly over `size` entries, from the first entry to the last.

    Return the entry before and the entry after each place, and its distance from the entry before.
    """
    places = torch.linspace(0, size - 1, count, device=device)
    low = places.floor().long()
    return low, (low + 1).clamp(max=size - 1), places - low
