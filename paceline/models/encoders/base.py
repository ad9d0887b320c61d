"""The interface of a model's encoders to workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.core.media import MediaKind
from paceline.kernels.encoding import Between
from paceline.kernels.transfer import to_device


class Encoder(Protocol):
    """An encoder of images and frames, or of audio."""

    takes: torch.dtype
    """The dtype of the encoder's input."""

    def rows(self, shape: Sequence[int]) -> int:
        """Return the number of rows of the encoding of an input of this shape.

        Raises InvalidRequestError if the encoder takes no input of this shape.
        """

    def encode(self, x: Tensor, between: Between) -> Tensor:
        """Return the encoding [rows, row_size] of an input whose dtype and shape were checked."""


class Encoders:
    """The encoders of a model. Call it under `torch.inference_mode()`.

    Args:
        row_size: elements of a row of an encoding.
        dtype: dtype of encodings.
        device: device of encodings; inputs are on the CPU.
    """

    def __init__(
        self, by_kind: Mapping[MediaKind, Encoder], row_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._by_kind = by_kind
        self._device = device
        self.kinds = frozenset(by_kind)
        """The kinds of media inputs that the model reads."""
        self.row_size = row_size
        self.dtype = dtype

    def rows(self, kind: MediaKind, shape: Sequence[int]) -> int:
        """Return the number of rows of the encoding of an input of this kind and shape. Its prompt has as many
        placeholder tokens.

        Raises InvalidRequestError if the model has no encoder of this kind, or it takes no input of this shape.
        """
        return self._encoder(kind).rows(shape)

    def encode(self, kind: MediaKind, tensor: Tensor, between: Between = lambda: None) -> Tensor:
        """Compute the encoding of a media input: [rows, row_size] in `dtype`, on the encoders' device.

        Args:
            tensor: the input, on the CPU. An image or a frame is uint8 [height, width, 3]; if the model's encoder reads
                several frames at once, they are [frames, height, width, 3]. Audio is fp32: log-mel features [frames,
                features], or samples [samples], as the model's encoder takes it.
            between: called before each piece of the work.

        Raises InvalidRequestError if no encoder of the model takes an input of this kind, shape and dtype.
        """
        encoder = self._encoder(kind)
        encoder.rows(tensor.shape)
        if tensor.dtype != encoder.takes:
            wanted, found = (str(dtype).removeprefix("torch.") for dtype in (encoder.takes, tensor.dtype))
            raise InvalidRequestError(f"an input of kind {kind.value} must be {wanted}, not {found}")
        return encoder.encode(to_device(tensor.contiguous(), self._device), between)

    def _encoder(self, kind: MediaKind) -> Encoder:
        encoder = self._by_kind.get(kind)
        if encoder is None:
            known = ", ".join(sorted(each.value for each in self.kinds))
            raise InvalidRequestError(f"this model does not read inputs of kind {kind.value}; it reads: {known}")
        return encoder
