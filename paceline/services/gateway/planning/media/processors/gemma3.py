"""Gemma 3: images of one size, each with the same number of tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from paceline.core.errors import InvalidRequestError
from paceline.core.media import MediaKind
from paceline.services.gateway.planning.media.items import Expansion, ImageSize, ItemKind, MediaTokens, Piece, TokenRun
from paceline.services.gateway.planning.media.processors.base import (
    OPTIONS_FIELD,
    Pixels,
    Processor,
    check_names,
    media_input,
    resized,
)

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gemma3Processor(Processor):
    """The preprocessing of `Gemma3ForConditionalGeneration`."""

    tokens: MediaTokens
    image_token: int
    begin_token: int
    end_token: int
    height: int
    width: int
    """Height and width to which all images are resized, in pixels."""
    length: int
    """Number of placeholder tokens of an image or a crop."""
    resample: Image.Resampling
    pan_and_scan: bool = False
    """Whether a long image is also shown in crops."""
    least_crop: int = 256
    """Shortest side of a crop, in pixels."""
    most_crops: int = 4
    least_ratio: float = 1.2
    """Smallest ratio of the longer to the shorter side of an image that is also shown in crops."""

    def with_options(self, given: Json) -> Gemma3Processor:
        """Return a processor with another value of `do_pan_and_scan`, which may also be inside `images_kwargs`."""
        check_names(given, ("do_pan_and_scan", "images_kwargs"))
        nested = given.get("images_kwargs") or {}
        if isinstance(nested, Mapping):
            check_names(nested, ("do_pan_and_scan",), f"{OPTIONS_FIELD}.images_kwargs")
            wanted = nested.get("do_pan_and_scan", given.get("do_pan_and_scan", self.pan_and_scan))
            if isinstance(wanted, bool):
                return dataclasses.replace(self, pan_and_scan=wanted)
        raise InvalidRequestError(f"{OPTIONS_FIELD}: do_pan_and_scan must be true or false", OPTIONS_FIELD)

    def tokens_of(self, kind: ItemKind, shape: Sequence[int]) -> int:
        return self.length

    def fit(self, height: int, width: int) -> ImageSize | None:
        return None if self.pan_and_scan else self._size

    @property
    def _size(self) -> ImageSize:
        return ImageSize(self.height, self.width, self.resample)

    def image(self, pixels: Pixels, size: tuple[int, int] | None = None) -> Expansion:
        crops = list(self._crops(pixels)) if self.pan_and_scan else []
        whole = self._picture(pixels)
        if not crops:
            return Expansion(whole)
        pieces = ["Here is the original image ", *whole, " and here are some crops to help you see better "]
        for index, crop in enumerate(crops):
            pieces += [" "] * (index > 0) + list(self._picture(crop))
        return Expansion(tuple(pieces))

    def _picture(self, pixels: Pixels) -> tuple[Piece, ...]:
        own = media_input(MediaKind.IMAGE, self.length, resized(pixels, self._size))
        return "\n\n", self.begin_token, TokenRun.of(self.image_token, own), self.end_token, "\n\n"

    def _crops(self, pixels: Pixels) -> Iterator[Pixels]:
        """Yield the crops of a long or wide image, which lie side by side; nothing for other images."""
        height, width = pixels.shape[:2]
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter < self.least_ratio:
            return
        count = min(math.floor(longer / shorter + 0.5), longer // self.least_crop)
        count = min(max(2, count), self.most_crops)
        rows, columns = (1, count) if width >= height else (count, 1)
        tall, wide = math.ceil(height / rows), math.ceil(width / columns)
        if min(tall, wide) < self.least_crop:
            return
        for row, column in itertools.product(range(rows), range(columns)):
            yield pixels[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]


def read_gemma3(config: Json, settings: Json) -> Gemma3Processor | None:
    """Return the processor of a Gemma 3 model; None if the model has no encoder.

    Args:
        config: the values of config.json.
        settings: the values of preprocessor_config.json or processor_config.json.
    """
    vision = config.get("vision_config")
    if vision is None:
        return None
    own = settings.get("image_processor", settings)
    side = vision.get("image_size", 896)
    size = own.get("size") or {}
    begin, end, image = (
        _token_id(config, name, default) for name, default in (("boi", 255999), ("eoi", 256000), ("image", 262144))
    )
    options = {
        "least_crop": own.get("pan_and_scan_min_crop_size"),
        "most_crops": own.get("pan_and_scan_max_num_crops"),
        "least_ratio": own.get("pan_and_scan_min_ratio_to_activate"),
    }
    return Gemma3Processor(
        MediaTokens({"image": (begin,)}, frozenset({begin, end, image})),
        image,
        begin,
        end,
        size.get("height", side),
        size.get("width", side),
        config.get("mm_tokens_per_image", 256),
        Image.Resampling(own.get("resample", Image.Resampling.BILINEAR)),
        bool(own.get("do_pan_and_scan")),
        **{name: value for name, value in options.items() if value is not None},
    )


def _token_id(config: Json, name: str, default: int) -> int:
    """Return the id of a token. Older and newer configs have different names for it."""
    found = config.get(f"{name}_token_index", config.get(f"{name}_token_id"))
    return default if found is None else int(found)
