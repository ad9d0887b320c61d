"""The encoders of Gemma 4's unified model: a linear layer over large patches, and one over samples of audio."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.kernels.encoding import Between
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Linear
from paceline.models.encoder_config import PatchEmbedderConfig, SampleEmbedderConfig
from paceline.models.encoders.blocks import (
    LayerNorm,
    Projection,
    media_place,
    patch_grid,
    patch_positions,
    patches,
    scaled,
)
from paceline.models.encoders.pieces import Pieces

_LAYER_NORM_EPS = 1e-5


class PatchEmbedder:
    """The encoder of images and frames. A row of the encoding stands for one patch."""

    takes = torch.uint8

    def __init__(self, config: PatchEmbedderConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        size, size_in = config.hidden_size, 3 * config.patch_side**2
        # The released checkpoint and transformers have different names.
        place = media_place(weights, "pos_embedding", "vision_embedder", "embed_vision")
        self._config = config
        self._pre_norm = LayerNorm(weights, f"{place}.patch_ln1", size_in, _LAYER_NORM_EPS, kernels)
        self._embed = Linear.take(weights, f"{place}.patch_dense", size_in, size, True, kernels)
        self._post_norm = LayerNorm(weights, f"{place}.patch_ln2", size, _LAYER_NORM_EPS, kernels)
        self._positions = weights.take(f"{place}.pos_embedding", config.positions, 2, size)
        self._norm = LayerNorm(weights, f"{place}.pos_norm", size, _LAYER_NORM_EPS, kernels)
        names = ("embed_vision", "embed_vision.multimodal_embedder")
        self._project = Projection(weights, names, size, hidden_size, config.norm_eps, kernels)
        self._kernels = kernels

    def rows(self, shape: Sequence[int]) -> int:
        rows, columns = patch_grid(shape, self._config.patch_side, self._config.positions)
        return rows * columns

    def encode(self, x: Tensor, between: Between) -> Tensor:
        side = self._config.patch_side
        across, down = patch_positions(x.shape[0] // side, x.shape[1] // side, x.device)
        (rows,) = Pieces(between, x.device).of(self._encoded, patches(x, side), across, down)
        return rows

    def _encoded(self, tiles: Tensor, across: Tensor, down: Tensor) -> tuple[Tensor]:
        hidden = self._post_norm(self._embed(self._pre_norm(scaled(tiles).to(self._positions.dtype))))
        places = self._kernels.add(self._positions[across, 0], self._positions[down, 1])
        return (self._project(self._norm(self._kernels.add(hidden, places))),)


class SampleEmbedder:
    """The encoder of audio, from samples fp32 [samples]. The last row's missing samples are 0."""

    takes = torch.float32

    def __init__(self, config: SampleEmbedderConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        self._samples = config.samples
        self._project = Projection(weights, ("embed_audio",), config.samples, hidden_size, config.norm_eps, kernels)

    def rows(self, shape: Sequence[int]) -> int:
        if len(shape) != 1 or shape[0] < 1:
            raise InvalidRequestError(f"audio for this model must be samples [samples], not {list(shape)}")
        return -(-shape[0] // self._samples)

    def encode(self, x: Tensor, between: Between) -> Tensor:
        padded = F.pad(x, (0, -len(x) % self._samples))
        (rows,) = Pieces(between, x.device).of(
            lambda samples: (self._project(samples),), padded.view(-1, self._samples)
        )
        return rows
