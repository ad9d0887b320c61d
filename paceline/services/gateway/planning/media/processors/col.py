"""ColPali and ColQwen2: the images of PaliGemma and Qwen 2-VL, whose tokens have one position each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import ModelError
from paceline.core.media import MediaKind
from paceline.services.gateway.planning.media.items import FrameSampling, MediaTokens, Piece, TokenRun
from paceline.services.gateway.planning.media.processors.base import media_input
from paceline.services.gateway.planning.media.processors.llava import LlavaProcessor
from paceline.services.gateway.planning.media.processors.qwen3_vl import PixelBounds, Qwen3VLProcessor

Json = Mapping[str, Any]

_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
"""How the encoder of Qwen 2-VL scales pixels."""
_TOKENS = {"vision_start": 151652, "vision_end": 151653, "image": 151655}


@dataclass(frozen=True, slots=True)
class ColQwen2Processor(Qwen3VLProcessor):
    """The preprocessing of `ColQwen2ForRetrieval`."""

    def _picture(self, shown: NDArray[np.uint8], kind: MediaKind) -> tuple[Piece, ...]:
        rows, columns = (size // self.side for size in shown.shape[:2])
        own = media_input(kind, rows * columns, shown)
        return self.start_token, TokenRun.of(self.image_token, own), self.end_token


def read_colqwen2(config: Json, settings: Json) -> ColQwen2Processor:
    """Return the processor of a ColQwen2. Raises ModelError if its pixels are scaled in another way than by CLIP."""
    own, inner = settings.get("image_processor", settings), config.get("vlm_config") or {}
    if any(own.get(name) is not None and tuple(own[name]) != value for name, value in _CLIP.items()):
        raise ModelError(
            "the image_mean and image_std of this model must be those of CLIP; correct its preprocessor's config"
        )
    vision = inner.get("vision_config") or {}
    start, end, image = (inner.get(f"{name}_token_id", default) for name, default in _TOKENS.items())
    bounds = PixelBounds.read(own, 56 * 56, 28 * 28 * 1280)
    return ColQwen2Processor(
        MediaTokens({"image": (start, image, end)}, frozenset({start, end, image})),
        start,
        end,
        image,
        image,
        side=vision.get("patch_size", 14) * vision.get("spatial_merge_size", 2),
        image_bounds=bounds,
        video_bounds=bounds,
        frames=FrameSampling(1),
        frame_limit=1,
    )


def read_colpali(config: Json, settings: Json) -> LlavaProcessor:
    """Return the processor of a ColPali, whose images all have one size."""
    own, inner = settings.get("image_processor", settings), config.get("vlm_config") or {}
    if any(value != 0.5 for name in ("image_mean", "image_std") for value in own.get(name) or ()):
        raise ModelError("the image_mean and image_std of this model must be 0.5; correct its preprocessor's config")
    vision = inner.get("vision_config") or {}
    side, image = int(vision.get("image_size", 224)), int(inner.get("image_token_id") or inner["image_token_index"])
    return LlavaProcessor(
        MediaTokens({"image": (image,)}, frozenset({image})),
        image,
        length=(side // int(vision.get("patch_size", 16))) ** 2,
        size=(side, side),
        crop=None,
        resample=Image.Resampling(own.get("resample", Image.Resampling.BICUBIC)),
    )
