"""Building blocks of encoders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Linear


def media_place(weights: Weights, tensor: str, *names: str) -> str:
    """Return the prefix of the tensors of a part beside the text model.

    Args:
        tensor: the name of any tensor of this part, after the prefix.
        names: names that the part may have, without "model." or "vlm.", which some checkpoints have in front.
    """
    places = [f"{outer}{name}" for name in names for outer in ("model.", "", "vlm.", "vlm.model.")]
    return next((place for place in places if weights.has(f"{place}.{tensor}")), places[0])


def patch_grid(shape: Sequence[int], side: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of square patches of an image [height, width, 3].

    Raises InvalidRequestError if a side of the image is no multiple of a patch's side, or has more than `most` patches.
    """
    if len(shape) != 3 or shape[2] != 3 or not all(0 < size <= most * side and size % side == 0 for size in shape[:2]):
        raise InvalidRequestError(
            f"an image for this model must be [height, width, 3] with sides that are multiples of {side} and at most "
            f"{most * side}, not {list(shape)}"
        )
    return shape[0] // side, shape[1] // side


def patches(image: Tensor, side: int) -> Tensor:
    """Return the patches of uint8 image [height, width, 3], row by row.

    The result is uint8 [patches, side * side * 3]: rows, columns and colors of a patch, in this order.
    """
    height, width, colors = image.shape
    tiles = image.view(height // side, side, width // side, side, colors).transpose(1, 2)
    return tiles.reshape(-1, side * side * colors)


def scaled(pixels: Tensor) -> Tensor:
    """Return uint8 pixels as fp32 numbers from 0 to 1."""
    return pixels.float().div_(255.0)


def signed(pixels: Tensor) -> Tensor:
    """Return uint8 pixels as fp32 numbers from -1 to 1."""
    return scaled(pixels).mul_(2.0).sub_(1.0)


def patch_positions(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the column and the row of each patch, row by row: int64 [patches] each."""
    return (
        torch.arange(columns, device=device).repeat(rows),
        torch.arange(rows, device=device).repeat_interleave(columns),
    )


def channels_last(weight: Tensor) -> Tensor:
    """Return a convolution's weight [out, channels, rows, columns] as a matrix [out, rows * columns * channels]."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def pool(x: Tensor, columns: int, side: int) -> Tensor:
    """Return the mean of each square of side x side patches, row by row.

    Args:
        x: [patches, size].
        columns: number of patches in a row.

    Returns:
        fp32 [squares, size]. Sums of many patches may be too large for fp16.
    """
    squares = x.view(-1, side, columns // side, side, x.shape[1])
    return squares.float().mean(dim=(1, 3)).flatten(0, 1)


class LayerNorm:
    """Layer norm over the last dimension."""

    def __init__(
        self, weights: Weights, place: str, size: int, eps: float, kernels: Kernels, bias: bool = True
    ) -> None:
        self._weight = weights.take(f"{place}.weight", size)
        self._bias = weights.take(f"{place}.bias", size) if bias else None
        self._eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)


class ClippedLinear:
    """A linear layer that clips its inputs and outputs to bounds, which the checkpoint has beside the weight."""

    def __init__(
        self,
        weights: Weights,
        place: str,
        size_in: int,
        size_out: int,
        kernels: Kernels,
        order: Sequence[int] | None = None,
    ) -> None:
        self._weight = weights.take_packed(f"{place}.linear.weight", size_out, size_in, order=order)
        names = ("input_min", "input_max", "output_min", "output_max")
        self._bounds = torch.stack([weights.take(f"{place}.{name}", dtype=torch.float32) for name in names])
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.clipped_linear(x, self._weight, self._bounds)


def tower_linear(
    weights: Weights,
    place: str,
    size_in: int,
    size_out: int,
    clipped: bool,
    kernels: Kernels,
    order: Sequence[int] | None = None,
) -> ClippedLinear | Linear:
    """Take a linear layer of one of Gemma 4's towers, with the arguments of `Linear.take`; `clipped` if it has
    bounds.
    """
    if clipped:
        return ClippedLinear(weights, place, size_in, size_out, kernels, order)
    return Linear.take(weights, f"{place}.linear", size_in, size_out, False, kernels, order)


class Projection:
    """The last step of Gemma 4's encoders: a norm without weight, and a linear layer to the text model's hidden size.

    The norm is in fp32, because elements may be too large for fp16 before it.

    Args:
        names: names that the part may have, as for `media_place`.
    """

    def __init__(
        self, weights: Weights, names: Sequence[str], size_in: int, size_out: int, eps: float, kernels: Kernels
    ) -> None:
        matrix = "embedding_projection.weight"
        weight = weights.take_packed(f"{media_place(weights, matrix, *names)}.{matrix}", size_out, size_in)
        self._linear = Linear(weight, None, kernels)
        self._dtype = weight.dtype
        self._eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows of an encoding [rows, size_out] in the model's dtype, from x [rows, size_in] in any dtype."""
        wide = x.float()
        ones = torch.ones(wide.shape[1], device=wide.device)
        return self._linear(self._kernels.rms_norm(wide, ones, self._eps, NormKind.WIDE).to(self._dtype))
