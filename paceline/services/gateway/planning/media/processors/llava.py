"""LLaVA: images that CLIP's or SigLIP's preprocessing makes equally large, each with the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaKind
from paceline.services.gateway.planning.media.items import Expansion, ImageSize, ItemKind, MediaTokens, TokenRun
from paceline.services.gateway.planning.media.processors.base import (
    Pixels,
    Processor,
    check_names,
    media_input,
    resized,
)

Json = Mapping[str, Any]
Size = tuple[int, int]
"""Height and width in pixels."""

_MAX_RATIO = 50
"""Largest ratio of an image's sides. An image with a larger ratio would become very large before it is cropped."""


@dataclass(frozen=True, slots=True)
class LlavaProcessor(Processor):
    """The preprocessing of `LlavaForConditionalGeneration`."""

    tokens: MediaTokens
    image_token: int
    length: int
    """Number of placeholder tokens of an image."""
    size: int | Size | None
    """Size to which an image is resized, in pixels: its shorter side, or height and width; None keeps its size."""
    crop: Size | None
    """Size of the middle that is cut out of the image; smaller images are padded with black. None cuts nothing."""
    resample: Image.Resampling

    def with_options(self, given: Json) -> LlavaProcessor:
        """Return this processor, which has no options. Raises InvalidRequestError if any are given."""
        check_names(given, ())
        return self

    def tokens_of(self, kind: ItemKind, shape: Sequence[int]) -> int:
        return self.length

    def fit(self, height: int, width: int) -> ImageSize | None:
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise InvalidRequestError(
                f"it has {width} x {height} pixels, and this model takes no image that is more than {_MAX_RATIO} times "
                "as long as wide; send a part of it"
            )
        if self.size is None:
            return None
        if isinstance(self.size, int):
            short = min(height, width)
            height, width = self.size * height // short, self.size * width // short
        else:
            height, width = self.size
        return ImageSize(height, width, self.resample)

    def image(self, pixels: Pixels, size: tuple[int, int] | None = None) -> Expansion:
        if (wanted := self.fit(*(size or pixels.shape[:2]))) is not None:
            pixels = resized(pixels, wanted)
        if self.crop is not None:
            pixels = _middle(pixels, *self.crop)
        return Expansion((TokenRun.of(self.image_token, media_input(MediaKind.IMAGE, self.length, pixels)),))


def _middle(pixels: Pixels, height: int, width: int) -> Pixels:
    """Return the middle of an image, with black around it if the image is too small."""
    lack = [max(0, wanted - own) for wanted, own in zip((height, width), pixels.shape)]
    padded = np.pad(pixels, [*((-(-each // 2), each // 2) for each in lack), (0, 0)])
    top, left = (padded.shape[0] - height) // 2, (padded.shape[1] - width) // 2
    return padded[top : top + height, left : left + width]


def read_llava(config: Json, settings: Json) -> LlavaProcessor:
    """Return the processor of a LLaVA model.

    Args:
        config: the values of config.json.
        settings: the values of preprocessor_config.json and processor_config.json.

    Raises:
        ModelError: the model needs a preprocessing that is not implemented.
    """
    vision = config.get("vision_config") or {}
    own = {**settings, **(settings.get("image_processor") or {})}
    side = int(vision.get("image_size", 336))
    if own.get("do_pad"):
        raise ModelError("preprocessor_config.json: do_pad is not supported for this model")
    size = _size(own.get("size", side)) if own.get("do_resize", True) else None
    crop = _size(own.get("crop_size", side)) if own.get("do_center_crop", isinstance(size, int)) else None
    image = int(config.get("image_token_index") or config.get("image_token_id") or 32000)
    patch = int(settings.get("patch_size") or vision.get("patch_size", 14))
    strategy = settings.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy", "default")
    # CLIP puts the embedding of the whole image before those of patches; the strategy "default" leaves the first out.
    has_whole = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    return LlavaProcessor(
        MediaTokens({"image": (image,)}, frozenset({image})),
        image,
        length=(side // patch) ** 2 + has_whole - (strategy == "default"),
        size=size,
        crop=(crop, crop) if isinstance(crop, int) else crop,
        resample=Image.Resampling(own.get("resample", Image.Resampling.BICUBIC)),
    )


def _size(value: int | Json) -> int | Size:
    """Return a size from preprocessor_config.json: the shorter side, or height and width."""
    if isinstance(value, int):
        return value
    return int(value["shortest_edge"]) if "shortest_edge" in value else (int(value["height"]), int(value["width"]))
