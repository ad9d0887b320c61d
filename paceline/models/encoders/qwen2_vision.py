"""The vision tower of Qwen 2-VL: a transformer over patches without a table of positions, whose results are merged in
squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.kernels.encoding import Between
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Linear
from paceline.models.encoder_config import Qwen2VisionConfig
from paceline.models.encoders.blocks import LayerNorm, media_place
from paceline.models.encoders.patch_layer import PatchLayer
from paceline.models.encoders.pieces import Pieces
from paceline.models.encoders.qwen3_vision import colors_last, cut_patches, squares_of
from paceline.models.model_config import Rope
from paceline.models.rotary import inverse_frequencies

_EPS = 1e-6
_MEAN, _DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of the pixels with which CLIP was trained, from 0 to 1."""
_SHARP = 1.702
"""gelu is about x * sigmoid(1.702 x) = silu(1.702 x) / 1.702."""


class Qwen2Vision:
    """The encoder of images. The patches of a square follow each other."""

    takes = torch.uint8

    def __init__(self, config: Qwen2VisionConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        size, side = config.hidden_size, config.patch_side
        place = media_place(weights, "patch_embed.proj.weight", "visual")
        self._config = config
        # The checkpoint has a convolution, whose patches have colors first.
        shape = (size, 3, config.patch_frames, side, side)
        (weight,) = weights.take_packed_derived(f"{place}.patch_embed.proj.weight", shape, [colors_last])
        self._embed, self._dtype = Linear(weight, None, kernels), weight.dtype
        self._layers = [_layer(config, weights, f"{place}.blocks.{layer}", kernels) for layer in range(config.layers)]
        self._merge = _Merger(config, hidden_size, weights, f"{place}.merger", kernels)
        # The first half of a head turns by the patch's row, and the second half by its column.
        self._frequencies = inverse_frequencies(Rope(config.rope_theta), size // config.heads // 2)
        self._tower = kernels.compile_tower(self._run_layers)

    def rows(self, shape: Sequence[int]) -> int:
        side = self._config.patch_side * self._config.merged_side
        if len(shape) != 3 or shape[2] != 3 or not all(size > 0 and size % side == 0 for size in shape[:2]):
            raise InvalidRequestError(
                f"an image for this model must be [height, width, 3] with sides that are multiples of {side}, not "
                f"{list(shape)}"
            )
        return shape[0] // side * (shape[1] // side)

    def encode(self, x: Tensor, between: Between) -> Tensor:
        config, pieces = self._config, Pieces(between, x.device)
        patches = cut_patches(x.expand(config.patch_frames, *x.shape), config.patch_side)
        rows, columns = patches.shape[:2]
        tiles = squares_of(patches, config.merged_side).flatten(1)
        grid = torch.cartesian_prod(torch.arange(rows, device=x.device), torch.arange(columns, device=x.device))
        places = squares_of(grid.view(rows, columns, 2), config.merged_side)
        angles = (places.unsqueeze(2) * self._frequencies.to(places.device)).flatten(1).repeat(1, 2)
        (hidden,) = pieces.of(self._embedded, tiles)
        (hidden,) = self._tower(hidden, angles.cos(), angles.sin(), between=between)
        return self._merge(hidden, pieces)

    def _run_layers(self, hidden: Tensor, cos: Tensor, sin: Tensor, between: Between) -> tuple[Tensor]:
        pieces = Pieces(between, hidden.device)
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, pieces)
        return (hidden,)

    def _embedded(self, tiles: Tensor) -> tuple[Tensor]:
        mean, deviation = (torch.tensor(own, device=tiles.device) for own in (_MEAN, _DEVIATION))
        pixels = (tiles.float().view(len(tiles), -1, 3) / 255 - mean) / deviation
        return (self._embed(pixels.flatten(1).to(self._dtype)),)


def _layer(config: Qwen2VisionConfig, weights: Weights, place: str, kernels: Kernels) -> PatchLayer:
    size, inner = config.hidden_size, config.inner_size
    # The factors of the activation are in the matrices around it, so the kernels need no activation of their own.
    (up,) = weights.take_packed_derived(f"{place}.mlp.fc1.weight", (inner, size), [lambda own: own * _SHARP])
    (down,) = weights.take_packed_derived(f"{place}.mlp.fc2.weight", (size, inner), [lambda own: own / _SHARP])
    mlp = (
        Linear(up, weights.take(f"{place}.mlp.fc1.bias", inner) * _SHARP, kernels),
        Linear(down, weights.take(f"{place}.mlp.fc2.bias", size), kernels),
    )
    return PatchLayer(size, config.heads, _EPS, weights, place, kernels, *mlp, kernels.silu)


class _Merger:
    """A norm, and an MLP over squares of patches: [patches, size] -> [squares, text size]."""

    def __init__(
        self, config: Qwen2VisionConfig, text_size: int, weights: Weights, place: str, kernels: Kernels
    ) -> None:
        self._patches = config.merged_side**2
        size = self._size = config.hidden_size * self._patches
        self._norm = LayerNorm(weights, f"{place}.ln_q", config.hidden_size, _EPS, kernels)
        self._up = Linear.take(weights, f"{place}.mlp.0", size, size, True, kernels)
        self._down = Linear.take(weights, f"{place}.mlp.2", size, text_size, True, kernels)
        self._kernels = kernels

    def __call__(self, x: Tensor, pieces: Pieces) -> Tensor:
        (merged,) = pieces.of(self._merged, x.view(-1, self._size))
        return merged

    def _merged(self, squares: Tensor) -> tuple[Tensor]:
        normed = self._norm(squares.view(len(squares) * self._patches, -1)).view(squares.shape)
        return (self._down(self._kernels.gelu(self._up(normed))),)
