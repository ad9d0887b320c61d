"""The vision tower of Gemma 3 and PaliGemma (SigLIP): a transformer over patches, whose results are projected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.kernels.encoding import Between
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Linear, RMSNorm
from paceline.models.encoder_config import SiglipConfig
from paceline.models.encoders.blocks import LayerNorm, channels_last, media_place, patches, pool, signed
from paceline.models.encoders.pieces import Pieces


class Siglip:
    """The encoder of images, which all have one size and one number of rows."""

    takes = torch.uint8

    def __init__(self, config: SiglipConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        size, side = config.hidden_size, config.patch_side
        embedding = "embeddings.patch_embedding"
        place = media_place(weights, f"{embedding}.weight", "vision_tower", "vision_tower.vision_model")
        self._config = config
        # The checkpoint has a convolution, whose patches have colors first.
        (weight,) = weights.take_packed_derived(f"{place}.{embedding}.weight", (size, 3, side, side), [channels_last])
        self._embed = Linear(weight, weights.take(f"{place}.{embedding}.bias", size), kernels)
        count = (config.image_side // side) ** 2
        self._positions = weights.take(f"{place}.embeddings.position_embedding.weight", count, size)
        self._layers = [
            _Layer(config, weights, f"{place}.encoder.layers.{layer}", kernels) for layer in range(config.layers)
        ]
        self._norm = LayerNorm(weights, f"{place}.post_layernorm", size, config.norm_eps, kernels)
        make = _Projector if config.pooled else _LinearProjector
        self._project = make(config, hidden_size, weights, kernels)
        self._kernels = kernels
        self._tower = kernels.compile_tower(self._run_layers)

    def rows(self, shape: Sequence[int]) -> int:
        side = self._config.image_side
        if tuple(shape) != (side, side, 3):
            raise InvalidRequestError(f"an image for this model must be [{side}, {side}, 3], not {list(shape)}")
        return self._config.rows_side**2

    def encode(self, x: Tensor, between: Between) -> Tensor:
        pieces = Pieces(between, x.device)
        (hidden,) = pieces.of(self._embedded, patches(x, self._config.patch_side), self._positions)
        (hidden,) = self._tower(hidden, between=between)
        return self._project(self._norm(hidden))

    def _run_layers(self, hidden: Tensor, between: Between) -> tuple[Tensor]:
        pieces = Pieces(between, hidden.device)
        for layer in self._layers:
            hidden = layer(hidden, pieces)
        return (hidden,)

    def _embedded(self, tiles: Tensor, places: Tensor) -> tuple[Tensor]:
        return (self._kernels.add(self._embed(signed(tiles).to(places.dtype)), places),)


class _Layer:
    def __init__(self, config: SiglipConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        size, inner = config.hidden_size, config.inner_size
        norm = partial(LayerNorm, weights, size=size, eps=config.norm_eps, kernels=kernels)
        take = partial(Linear.take, weights, bias=True, kernels=kernels)
        self._heads, self._scale = config.heads, (size // config.heads) ** -0.5
        self._norm, self._mlp_norm = norm(f"{place}.layer_norm1"), norm(f"{place}.layer_norm2")
        self._q, self._k, self._v, self._o = (
            take(f"{place}.self_attn.{name}_proj", size, size) for name in ("q", "k", "v", "out")
        )
        self._up, self._down = take(f"{place}.mlp.fc1", size, inner), take(f"{place}.mlp.fc2", inner, size)
        self._kernels = kernels

    def __call__(self, x: Tensor, pieces: Pieces) -> Tensor:
        queries, keys, values = pieces.of(self._heads_of, x)
        (x,) = pieces.of(partial(self._attend, keys=keys, values=values), x, queries, keys=len(keys))
        return x

    def _heads_of(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = self._norm(x)
        return tuple(linear(normed).view(len(x), self._heads, -1) for linear in (self._q, self._k, self._v))

    def _attend(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor]:
        kernels = self._kernels
        x = kernels.add(x, self._o(kernels.full_attention(queries, keys, values, self._scale).flatten(1)))
        return (kernels.add(x, self._down(kernels.gelu_tanh(self._up(self._mlp_norm(x))))),)


class _Projector:
    """The mean of squares of patches, a norm, and a linear layer to the text model's hidden size."""

    def __init__(self, config: SiglipConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        matrix, size = "mm_input_projection_weight", config.hidden_size
        place = media_place(weights, matrix, "multi_modal_projector")
        self._norm = RMSNorm(weights, f"{place}.mm_soft_emb_norm", size, config.norm_eps, kernels, NormKind.UNIT_OFFSET)
        (weight,) = weights.take_packed_derived(f"{place}.{matrix}", (size, hidden_size), [lambda own: own.T])
        self._linear = Linear(weight, None, kernels)
        self._columns = config.image_side // config.patch_side
        self._side = self._columns // config.rows_side

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(self._norm(pool(x, self._columns, self._side).to(x.dtype)))


class _LinearProjector:
    """A linear layer from a patch to the text model's hidden size."""

    def __init__(self, config: SiglipConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        place = media_place(weights, "linear.weight", "multi_modal_projector")
        self._linear = Linear.take(weights, f"{place}.linear", config.hidden_size, hidden_size, True, kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)
