"""Images become RGB, as models' own preprocessing reads them. Broken and hostile ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.items import ImageSize
from paceline.services.gateway.planning.media.pool import DecodeProcess
from tests.services.gateway.planning.media.conftest import Decode
from tests.services.gateway.planning.media.samples import IMAGE_FORMATS, MUTATIONS, Mutation, image_file, picture, png

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def pixels(decode: Decode, data: bytes, max_pixels: int = 1 << 20) -> Any:
    _, array = decode("image", data, max_pixels=max_pixels)
    assert array.dtype == np.uint8
    return array


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_reads_format(decode: Decode, format: str) -> None:
    array = pixels(decode, image_file(format))
    assert array.shape == (4, 6, 3)
    assert np.abs(array[0, 0].astype(int) - RED).max() < 40
    assert np.abs(array[0, 5].astype(int) - BLUE).max() < 40


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_converts_mode(decode: Decode, mode: str) -> None:
    image = picture().convert("L") if mode == "I;16" else picture().convert(mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    assert np.array_equal(pixels(decode, image_file("PNG", image)), np.asarray(image_of(image)))


def image_of(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def test_converts_cmyk(decode: Decode) -> None:
    array = pixels(decode, image_file("JPEG", picture(64, 64).convert("CMYK")))
    assert np.abs(array[8, 8].astype(int) - RED).max() < 40


def test_transparent_parts_are_white(decode: Decode) -> None:
    image = picture().convert("RGBA")
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    array = pixels(decode, image_file("PNG", image))
    assert tuple(array[0, 0]) == WHITE
    assert array[0, 1] == pytest.approx((127, 127, 127), abs=1)
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((1, 0), 1)
    array = pixels(decode, image_file("GIF", palette, transparency=1))
    assert (tuple(array[0, 0]), tuple(array[0, 1])) == (RED, WHITE)


@pytest.mark.parametrize(
    ("colour", "channels", "shown"),
    [
        (0, [0xABCD], (0xAB, 0xAB, 0xAB)),
        (2, [0x1234, 0x00FF, 0xFFFF], (0x12, 0, 0xFF)),
        (4, [0xABCD, 0xFFFF], (0xAB, 0xAB, 0xAB)),
        (4, [0xABCD, 0], WHITE),
        (6, [0x1234, 0x00FF, 0xFFFF, 0xFFFF], (0x12, 0, 0xFF)),
        (6, [0, 0, 0, 0], WHITE),
    ],
    ids=["grey", "RGB", "grey and alpha", "transparent grey", "RGBA", "transparent"],
)
def test_reads_16_bits_of_a_channel(
    decode: Decode, colour: int, channels: list[int], shown: tuple[int, int, int]
) -> None:
    row = b"\0" + struct.pack(f">{len(channels)}H", *channels)
    array = pixels(decode, png(1, 1, row, depth=16, colour=colour))
    assert (array.shape, tuple(array[0, 0])) == ((1, 1, 3), shown)


TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).transpose(1, 0, 2),
    8: np.rot90,
    9: lambda stored: stored,  # there is no such orientation
}
"""How an image is shown, by its EXIF orientation."""


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", TURNS)
def test_turns_by_exif_orientation(decode: Decode, orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.new("RGB", (40, 24), "red")
    stored.paste("blue", (0, 0, 16, 8))
    array = pixels(decode, image_file(format, stored, exif=exif))
    wanted = TURNS[orientation](np.asarray(stored))
    assert array.shape == wanted.shape
    for row, column in ((2, 2), (2, -3), (-3, 2), (-3, -3)):
        assert np.abs(array[row, column].astype(int) - wanted[row, column]).max() < 60


def test_reads_an_image_of_one_pixel(decode: Decode) -> None:
    for format in IMAGE_FORMATS:
        assert pixels(decode, image_file(format, Image.new("RGB", (1, 1), "red"))).shape == (1, 1, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_takes_first_frame_of_animation(decode: Decode, format: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    data = image_file(format, frames[0], save_all=True, append_images=frames[1:])
    assert np.abs(pixels(decode, data)[0, 0].astype(int) - RED).max() < 40


def test_takes_the_still_image_of_an_animated_png(decode: Decode) -> None:
    """It is what programs without animations show, and need not be one of the frames."""
    still, *frames = (Image.new("RGB", (4, 4), color) for color in ("red", "blue", "green"))
    data = image_file("PNG", still, save_all=True, append_images=frames, default_image=True)
    assert tuple(pixels(decode, data)[0, 0]) == RED


HUGE_GIF = struct.pack("<6sHHBBB", b"GIF89a", 65_535, 65_535, 0, 0, 0) + struct.pack(
    "<cHHHHBB", b",", 0, 0, 65_535, 65_535, 0, 2
)
REFUSED = {
    "nothing": (b"", "empty"),
    "spaces": (b" " * 600, "empty"),
    "noise": (b"\x00\xff" * 100, "not an image"),
    "svg": (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "page": (b"\n<!DOCTYPE html><html></html>", "web page"),
    "half": (image_file("PNG", picture(300, 300))[:200], "broken"),
    "half JPEG": (image_file("JPEG", picture(300, 300))[:-200], "broken"),
    "TIFF": (image_file("TIFF"), "not an image"),
    "huge head": (png(60_000, 60_000, b""), "--max-image-pixels"),
    "bomb": (png(30_000, 30_000, bytes(30_000)), "--max-image-pixels"),
    "many rows missing": (png(1000, 1000, bytes(100)), "broken"),
    "huge GIF": (HUGE_GIF, "--max-image-pixels"),
    "too large for memory": (png(2000, 2000, bytes(10)), "--media-memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(decode: Decode, name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(MediaError, match=message):
        pixels(decode, data, max_pixels=5_000_000)


def test_bound_of_pixels_is_exact(decode: Decode) -> None:
    assert pixels(decode, image_file(), max_pixels=24).shape == (4, 6, 3)
    with pytest.raises(MediaError, match="at most 23"):
        pixels(decode, image_file(), max_pixels=23)


@given(format=st.sampled_from(IMAGE_FORMATS), mutation=MUTATIONS)
def test_mutated_file_is_decoded_or_refused(
    process: DecodeProcess, decode: Decode, format: str, mutation: Mutation
) -> None:
    before = process.pid
    try:
        _, array = decode("image", mutation.of(image_file(format, picture(40, 30))), max_pixels=1 << 20)
    except MediaError:
        pass
    else:
        assert array.ndim == 3
        assert array.shape[2] == 3
    assert process.pid == before


def job(**options: int) -> dict[str, Any]:
    return {"kind": "image", "options": {"max_pixels": 1 << 20, **options}, "max_bytes": 300, "seconds": 60.0}


def test_an_image_is_resized_where_it_is_decoded(process: DecodeProcess) -> None:
    seen = []

    def fit(height: int, width: int) -> ImageSize:
        seen.append((height, width))
        return ImageSize(5, 7, Image.Resampling.BICUBIC)

    large = Image.linear_gradient("L").convert("RGB").crop((0, 0, 200, 100))
    _, array = process.decode(job(), image_file("PNG", large), 60.0, fit)
    assert np.array_equal(array, np.asarray(large.resize((7, 5), Image.Resampling.BICUBIC)))
    assert seen == [(100, 200)]


def test_an_image_may_be_refused_by_its_size_or_stay_as_it_is(process: DecodeProcess) -> None:
    def refuse(height: int, width: int) -> None:
        raise InvalidRequestError(f"{height} x {width} is too small")

    with pytest.raises(InvalidRequestError, match="4 x 6 is too small"):
        process.decode(job(), image_file(), 60.0, refuse)
    assert process.is_usable
    _, array = process.decode(job(), image_file(), 60.0, lambda height, width: None)
    assert array.shape == (4, 6, 3)
    with pytest.raises(MediaError, match="--media-memory"):
        process.decode(job(), image_file("PNG", picture(40, 30)), 60.0, lambda height, width: None)
