"""Decodes images, and resizes them if the model does not need all pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from paceline.services.gateway.planning.media.container import BrokenItemError, check_not_text
from paceline.services.gateway.planning.media.items import Fit

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_BYTES_PER_PIXEL = 3


def decode(
    data: memoryview, max_bytes: int, max_pixels: int, fit: Fit | None = None
) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Return {} (an image has no facts), and the image as RGB: [height, width, 3].

    Args:
        max_bytes: largest size of the returned array.
        max_pixels: largest number of pixels. A larger image is refused before it is decoded.
        fit: returns the size to which the image is resized; None keeps the image's own size.

    Raises BrokenItemError, or any error of Pillow.
    """
    check_not_text(data, "an image")
    # The size is checked below, against the server's option.
    Image.MAX_IMAGE_PIXELS = None
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise BrokenItemError("it is not an image that can be read; send a PNG, JPEG, WebP, GIF or BMP file") from None
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise BrokenItemError(
            f"it has {image.width} x {image.height} pixels, but at most {max_pixels} are allowed (--max-image-pixels); "
            "send a smaller one"
        )
    if fit is None:
        _check_memory(image, max_bytes)
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise BrokenItemError(f"the {image.format} file is broken ({str(error)[:100]})") from None
    ImageOps.exif_transpose(image, in_place=True)
    shown = _to_rgb(image)
    size = None if fit is None else fit(shown.height, shown.width)
    if size is not None and shown.size != (size.width, size.height):
        shown = shown.resize((size.width, size.height), Image.Resampling(size.resample))
    _check_memory(shown, max_bytes)
    return {}, np.asarray(shown)


def _check_memory(image: Image.Image, max_bytes: int) -> None:
    if image.width * image.height * _BYTES_PER_PIXEL > max_bytes:
        raise BrokenItemError("to decode it takes too much memory (--media-memory); send a smaller one")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB. Transparent parts become white, as in most models' own preprocessing."""
    if image.mode.startswith("I;16"):
        # Pillow clips 16 bits to 8 instead of scaling them.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(colours, mask=colours.getchannel("A"))
    return white
