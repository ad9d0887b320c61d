"""`Encoder` for the vision towers of models that run in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaKind
from paceline.core.model_folder import read_object
from paceline.kernels.encoding import Between
from paceline.kernels.interface import Kernels
from paceline.models.encoders.base import Encoders
from paceline.models.packing.quantized import Packer
from paceline.models.transformers_backend.linear import pack_linears
from paceline.models.transformers_backend.loading import foreign_code, load_config, load_module


def load_images(
    folder: Path, dtype: torch.dtype, kernels: Kernels, device: torch.device, trust_remote_code: bool
) -> Encoders:
    """Load the encoder of images of a model in its own code, without its text model.

    Raises:
        ConfigError: `transformers` is not installed.
        ModelError: the encoder cannot be loaded, or does something that is not supported.
    """
    config = load_config(folder, trust_remote_code)
    causal = load_module(folder, config, dtype, device, trust_remote_code)
    core = causal.base_model
    keep_children(core, [child for child in core.children() if child is not causal.get_decoder()])
    pack_linears(core, kernels, Packer(kernels, device))
    hidden_size = int(config.get_text_config().hidden_size)
    with torch.inference_mode(), foreign_code(f"{folder}: its encoder of images does not work"):
        images = ImageTower(core, config, read_object(folder / "preprocessor_config.json"), dtype, device, hidden_size)
    return Encoders({MediaKind.IMAGE: images}, hidden_size, dtype, device)


def keep_children(module: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Free all direct parts of a module that are not in `kept`."""
    for name, child in list(module.named_children()):
        if not any(child is each for each in kept):
            setattr(module, name, None)


class ImageTower:
    """The encoder of images, which all have one size and one number of rows.

    Args:
        core: the module that has `get_image_features`.
        settings: the values of preprocessor_config.json.

    Raises ModelError if rows do not have the form of the text model's hidden states, or if the settings do not say how
    pixels are scaled.
    """

    takes = torch.uint8

    def __init__(
        self,
        core: Any,
        config: Any,
        settings: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        hidden_size: int,
    ) -> None:
        self._core = core
        self._dtype = dtype
        self._shape = (config.vision_config.image_size, config.vision_config.image_size, 3)
        self._between: Between = lambda: None
        mean, std = settings.get("image_mean"), settings.get("image_std")
        if mean is None or std is None:
            raise ModelError("preprocessor_config.json has no image_mean and image_std")
        self._mean, self._std = (torch.tensor(each, dtype=torch.float32, device=device) for each in (mean, std))
        for part in core.modules():
            if isinstance(part, nn.ModuleList):
                for layer in part:
                    layer.register_forward_pre_hook(lambda *_: self._between())
        rows = self._features(torch.zeros(self._shape, dtype=torch.uint8, device=device))
        if rows.shape[1] != hidden_size:
            raise ModelError(f"its rows have {rows.shape[1]} elements instead of {hidden_size}")
        self._rows = len(rows)

    def rows(self, shape: Sequence[int]) -> int:
        if tuple(shape) != self._shape:
            raise InvalidRequestError(f"an image for this model must be {list(self._shape)}, not {list(shape)}")
        return self._rows

    def encode(self, x: Tensor, between: Between) -> Tensor:
        self._between = between
        return self._features(x)

    def _features(self, x: Tensor) -> Tensor:
        pixels = ((x.float() / 255 - self._mean) / self._std).movedim(2, 0)[None].to(self._dtype)
        features = self._core.get_image_features(pixels, return_dict=True).pooler_output
        return torch.cat(list(features)).flatten(0, -2)
