"""The vision tower of Gemma 4: a transformer over patches, whose results are pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.encoding import Between
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Linear, RMSNorm
from paceline.models.encoder_config import Gemma4VisionConfig
from paceline.models.encoders.blocks import (
    Projection,
    media_place,
    patch_grid,
    patch_positions,
    patches,
    pool,
    signed,
    tower_linear,
)
from paceline.models.encoders.pieces import Pieces
from paceline.models.model_config import Rope
from paceline.models.rotary import Rotation, inverse_frequencies


class Gemma4Vision:
    """The encoder of images and frames. A row of the encoding stands for `pooled_side` x `pooled_side` patches."""

    takes = torch.uint8

    def __init__(self, config: Gemma4VisionConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        size, table = config.hidden_size, "patch_embedder.position_embedding_table"
        place = media_place(weights, table, "vision_tower")
        self._config = config
        self._embed = Linear.take(
            weights, f"{place}.patch_embedder.input_proj", 3 * config.patch_side**2, size, False, kernels
        )
        self._positions = weights.take(f"{place}.{table}", 2, config.positions, size)
        self._layers = [
            _Layer(config, weights, f"{place}.encoder.layers.{layer}", kernels) for layer in range(config.layers)
        ]
        self._standard: tuple[Tensor, Tensor] | None = None
        if config.standardized:
            shift, scale = (
                weights.take(f"{place}.std_{name}", size, dtype=torch.float32) for name in ("bias", "scale")
            )
            self._standard = shift, scale
        self._project = Projection(weights, ("embed_vision",), size, hidden_size, config.norm_eps, kernels)
        # The first half of a head turns by the patch's column, and the second half by its row.
        self._frequencies = inverse_frequencies(Rope(config.rope_theta), config.head_dim // 2)
        self._kernels = kernels
        self._tower = kernels.compile_tower(self._run_layers)

    def rows(self, shape: Sequence[int]) -> int:
        config = self._config
        side = config.pooled_side
        rows, columns = patch_grid(shape, config.patch_side * side, config.positions // side)
        return rows * columns

    def encode(self, x: Tensor, between: Between) -> Tensor:
        config, pieces = self._config, Pieces(between, x.device)
        columns = x.shape[1] // config.patch_side
        across, down = patch_positions(x.shape[0] // config.patch_side, columns, x.device)
        (hidden,) = pieces.of(self._embedded, patches(x, config.patch_side), across, down)
        rotation = self._rotation(across, down)
        (hidden,) = self._tower(hidden, rotation.cos, rotation.sin, between=between)
        pooled = pool(hidden, columns, config.pooled_side) * config.hidden_size**0.5
        if self._standard is not None:
            shift, scale = self._standard
            pooled = (pooled - shift) * scale
        return self._project(pooled)

    def _embedded(self, tiles: Tensor, across: Tensor, down: Tensor) -> tuple[Tensor]:
        places = self._kernels.add(self._positions[0][across], self._positions[1][down])
        return (self._kernels.add(self._embed(signed(tiles).to(places.dtype)), places),)

    def _run_layers(self, hidden: Tensor, cos: Tensor, sin: Tensor, between: Between) -> tuple[Tensor]:
        pieces = Pieces(between, hidden.device)
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, pieces)
        return (hidden,)

    def _rotation(self, across: Tensor, down: Tensor) -> Rotation:
        frequencies = self._frequencies.to(across.device)
        angles = torch.cat([axis.unsqueeze(1) * frequencies for axis in (across, down)], dim=1).repeat(1, 2)
        return Rotation(angles.cos(), angles.sin())


class _Layer:
    def __init__(self, config: Gemma4VisionConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        norm = partial(RMSNorm, size=config.hidden_size, eps=config.norm_eps, kernels=kernels, kind=NormKind.WIDE)
        self._norm = norm(weights, f"{place}.input_layernorm")
        self._attention = _Attention(config, weights, f"{place}.self_attn", kernels)
        self._post_attention = norm(weights, f"{place}.post_attention_layernorm")
        self._pre_mlp = norm(weights, f"{place}.pre_feedforward_layernorm")
        self._mlp = _MLP(config, weights, f"{place}.mlp", kernels)
        self._post_mlp = norm(weights, f"{place}.post_feedforward_layernorm")
        self._kernels = kernels

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, pieces: Pieces) -> Tensor:
        queries, keys, values = pieces.of(self._heads, x, cos, sin)
        (x,) = pieces.of(partial(self._attend, keys=keys, values=values), x, queries, keys=len(keys))
        return x

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._attention.heads(self._norm(x), cos, sin)

    def _attend(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor]:
        attended = self._post_attention(self._attention(queries, keys, values))
        x, normed = self._pre_mlp.of_sum(x, attended)
        return (self._kernels.add(x, self._post_mlp(self._mlp(normed))),)


class _Attention:
    """Attention with norms of queries, keys and values, and with two rotary embeddings in each head."""

    def __init__(self, config: Gemma4VisionConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        dim, size = config.head_dim, config.heads * config.head_dim
        self._shape = (-1, config.heads, dim)
        take = partial(tower_linear, weights, clipped=config.clipped, kernels=kernels)
        # Kernels turn dimension i of a head together with i + dim / 2, and the checkpoint does so in each half.
        quarters = torch.arange(dim).view(4, -1)
        order: list[int] = quarters[[0, 2, 1, 3]].flatten().tolist()
        all_heads = [head * dim + i for head in range(config.heads) for i in order]
        self._q = take(f"{place}.q_proj", config.hidden_size, size, order=all_heads)
        self._k = take(f"{place}.k_proj", config.hidden_size, size, order=all_heads)
        self._v = take(f"{place}.v_proj", config.hidden_size, size)
        self._o = take(f"{place}.o_proj", size, config.hidden_size)
        self._q_norm, self._k_norm = (weights.take(f"{place}.{name}_norm.weight", dim)[order] for name in ("q", "k"))
        self._ones = torch.ones_like(self._q_norm)
        self._eps = config.norm_eps
        self._kernels = kernels

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of rows x [rows, size]: [rows, heads, head_dim] each."""

        def normed(linear: Callable[[Tensor], Tensor], norm: Tensor) -> Tensor:
            return self._kernels.rms_norm(linear(x).view(self._shape), norm, self._eps, NormKind.WIDE)

        queries, keys = normed(self._q, self._q_norm), normed(self._k, self._k_norm)
        turned = [self._kernels.rotate(vectors, cos, sin) for vectors in (queries, keys)]
        return turned[0], turned[1], normed(self._v, self._ones)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._o(self._kernels.full_attention(queries, keys, values, scale=1.0).flatten(1))


class _MLP:
    def __init__(self, config: Gemma4VisionConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        take = partial(tower_linear, weights, clipped=config.clipped, kernels=kernels)
        self._gate = take(f"{place}.gate_proj", config.hidden_size, config.inner_size)
        self._up = take(f"{place}.up_proj", config.hidden_size, config.inner_size)
        self._down = take(f"{place}.down_proj", config.inner_size, config.hidden_size)
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._kernels.gelu_tanh_and_mul(self._gate(x), self._up(x)))
