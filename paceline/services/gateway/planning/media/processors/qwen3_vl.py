"""Qwen 3-VL: images of any shape within bounds of pixels, and videos as pairs of frames with the times of the pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaKind
from paceline.services.gateway.planning.media.items import (
    Expansion,
    FrameSampling,
    ImageSize,
    ItemKind,
    MediaTokens,
    Piece,
    TokenRun,
)
from paceline.services.gateway.planning.media.processors.base import (
    MAX_FRAME_PIXELS,
    OPTIONS_FIELD,
    Pixels,
    Processor,
    check_names,
    media_input,
    nested_options,
    resized,
    wrong_option,
)

Json = Mapping[str, Any]

MAX_RATIO = 200
"""Largest ratio of the sides of an image or a frame. The model's own processor refuses larger ratios, too."""
MAX_FPS = 1000
_SPARE_PIXELS = 4
"""Largest ratio of a decoded frame's pixels to those that the model sees. Spare pixels improve the resized frame."""


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Bounds of the pixels of a resized image, or of all frames of a resized video together."""

    least: int
    most: int
    """Largest number of pixels. If `least` is larger than `most`, `most` decides."""
    limit: int
    """The model's own `most`. No option may exceed it."""

    @staticmethod
    def read(own: Json, least: int, most: int) -> PixelBounds:
        """Return the bounds from a processor's own settings.

        Args:
            least: default of the smallest number of pixels.
            most: default of the largest number of pixels.
        """
        size = own.get("size") or {}
        least = own.get("min_pixels") or size.get("shortest_edge") or least
        most = own.get("max_pixels") or size.get("longest_edge") or most
        return PixelBounds(least, most, most)

    def with_options(self, given: Json) -> PixelBounds:
        """Return the bounds, changed by `min_pixels` and `max_pixels`, or by transformers' names for both in `size`."""
        size = given.get("size", {})
        if not isinstance(size, Mapping):
            raise wrong_option("size must be an object with shortest_edge and longest_edge, in pixels of the area")
        check_names(size, ("shortest_edge", "longest_edge"), f"{OPTIONS_FIELD}.size")
        least = given.get("min_pixels", size.get("shortest_edge", self.least))
        most = given.get("max_pixels", size.get("longest_edge", self.most))
        if not _are_integers((least, most), self.limit):
            raise wrong_option(f"the least and the most pixels must be integers from 1 to {self.limit}")
        return dataclasses.replace(self, least=least, most=most)


@dataclass(frozen=True, slots=True)
class Qwen3VLProcessor(Processor):
    """The preprocessing of Qwen 3-VL and Qwen 3.5."""

    tokens: MediaTokens
    start_token: int
    end_token: int
    image_token: int
    video_token: int
    side: int
    """Side of the square of an image that one token stands for, in pixels."""
    image_bounds: PixelBounds
    video_bounds: PixelBounds
    frames: FrameSampling
    frame_limit: int
    """The model's own largest number of frames. No option may exceed it."""
    frame_tokens: int | None = None
    """Largest number of tokens of a frame; if None, only the bound of the whole video counts."""

    def with_options(self, given: Json) -> Qwen3VLProcessor:
        """Return a processor with other options, which have the names of transformers and vLLM.

        Images have `min_pixels`, `max_pixels` and `size`. Videos have `size`, and `fps` with `min_frames` and
        `max_frames`, or else `num_frames`. Each may be given by itself, or inside `images_kwargs` or `videos_kwargs`.
        An option whose value is None changes nothing.
        """
        check_names(given, tuple(dict.fromkeys((*_IMAGE_OPTIONS, *_VIDEO_OPTIONS, "images_kwargs", "videos_kwargs"))))
        images, videos = (
            {
                name: value
                for options in (given, nested_options(given, field, known))
                for name, value in options.items()
                if name in known and value is not None
            }
            for field, known in (("images_kwargs", _IMAGE_OPTIONS), ("videos_kwargs", _VIDEO_OPTIONS))
        )
        return dataclasses.replace(
            self,
            image_bounds=self.image_bounds.with_options(images),
            video_bounds=self.video_bounds.with_options(videos),
            frames=self._frames_with_options(videos),
        )

    def _frames_with_options(self, given: Json) -> FrameSampling:
        if "num_frames" in given and "fps" in given:
            raise wrong_option("num_frames and fps exclude each other; leave one of them out")
        if given.get("do_sample_frames", True) is not True:
            raise wrong_option("do_sample_frames must be true, because frames are always taken out of a video here")
        least = given.get("min_frames", self.frames.least)
        most = given.get("num_frames", given.get("max_frames", self.frames.most))
        if not _are_integers((least, most), self.frame_limit):
            raise wrong_option(f"numbers of frames must be integers from 1 to {self.frame_limit}")
        if "num_frames" in given:
            return FrameSampling(most, to_end=True)
        fps = given.get("fps", self.frames.per_second)
        if "fps" in given and not (type(fps) in (int, float) and 0 < fps <= MAX_FPS):
            raise wrong_option(f"fps must be a number above 0 and at most {MAX_FPS}")
        return dataclasses.replace(self.frames, least=least, most=most, per_second=fps)

    def tokens_of(self, kind: ItemKind, shape: Sequence[int]) -> int:
        count, size = (1, self.fit(*shape[:2])) if kind == "image" else (shape[0], self._frame_size(*shape[:3]))
        return math.ceil(count / 2) * (size.height * size.width // self.side**2)

    def fit(self, height: int, width: int) -> ImageSize:
        return ImageSize(*image_size(height, width, self.side, self.image_bounds), Image.Resampling.BICUBIC)

    def image(self, pixels: Pixels, size: tuple[int, int] | None = None) -> Expansion:
        shown = resized(pixels, self.fit(*(size or pixels.shape[:2])))
        return Expansion(self._picture(shown, MediaKind.IMAGE))

    @property
    def sampling(self) -> FrameSampling:
        total = _SPARE_PIXELS * self.video_bounds.most
        return dataclasses.replace(self.frames, max_pixels=MAX_FRAME_PIXELS, total_pixels=total)

    def video(self, frames: Sequence[Pixels], seconds: Sequence[float]) -> Expansion:
        """Return the expansion of a video: for each pair of frames its time and its placeholder tokens.

        If the number of frames is odd, the last frame is repeated. The start and the end that the template writes
        around each video stay in the prompt, as in transformers.
        """
        size = self._frame_size(len(frames), *frames[0].shape[:2])
        pieces: list[Piece] = [self.start_token]
        for first in range(0, len(frames), 2):
            second = min(first + 1, len(frames) - 1)
            pair = [resized(frames[number], size) for number in (first, second)]
            pieces.append(f"<{(seconds[first] + seconds[second]) / 2:.1f} seconds>")
            pieces += self._picture(np.stack(pair), MediaKind.VIDEO_FRAME)
        return Expansion((*pieces, self.end_token))

    def _frame_size(self, count: int, height: int, width: int) -> ImageSize:
        """Return the size to which each of a video's `count` frames is resized."""
        bounds = self.video_bounds
        if self.frame_tokens is not None:
            each = max(min(self.frame_tokens * self.side**2, bounds.most // count), int(bounds.least * 1.05))
            bounds = dataclasses.replace(bounds, most=each * count)
        return ImageSize(*frame_size(count, height, width, self.side, bounds), Image.Resampling.BICUBIC)

    def _picture(self, shown: NDArray[np.uint8], kind: MediaKind) -> tuple[Piece, ...]:
        """Return the placeholder tokens of an image [height, width, 3] or of a pair of frames [2, height, width, 3]."""
        rows, columns = (size // self.side for size in shown.shape[-3:-1])
        own = media_input(kind, rows * columns, shown)
        placeholder = self.image_token if kind is MediaKind.IMAGE else self.video_token
        return self.start_token, TokenRun.of(placeholder, own, (1, rows, columns)), self.end_token


_IMAGE_OPTIONS = ("min_pixels", "max_pixels", "size")
_VIDEO_OPTIONS = ("size", "fps", "num_frames", "min_frames", "max_frames", "do_sample_frames")
"""Options of videos. `do_sample_frames` has no effect of its own; clients of vLLM send it with `fps`."""


def _are_integers(values: Sequence[object], most: int) -> bool:
    """Return whether all values are integers from 1 to `most`."""
    return all(type(value) is int and 1 <= value <= most for value in values)


def image_size(height: int, width: int, side: int, bounds: PixelBounds) -> tuple[int, int]:
    """Return the height and width of a resized image, which are multiples of `side`, within bounds of pixels.

    Raises InvalidRequestError if the image is too long.
    """
    return _fitted(1, 1, height, width, side, bounds)


def frame_size(count: int, height: int, width: int, side: int, bounds: PixelBounds) -> tuple[int, int]:
    """Return the height and width, multiples of `side`, of each of a video's `count` resized frames.

    The bounds hold for all frames together. Raises InvalidRequestError if the frames are too long.
    """
    if min(height, width) < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    # A single frame is shown as a pair, too. Python rounds halves to even numbers here, as in transformers.
    count = max(2, count)
    paired = 2 * round(count / 2)
    return _fitted(count, paired, height, width, side, bounds)


def _fitted(count: int, counted: int, height: int, width: int, side: int, bounds: PixelBounds) -> tuple[int, int]:
    """Return the height and width to which each of `count` pictures is resized, within bounds of pixels.

    Args:
        counted: the number of pictures, padded to whole pairs, whose pixels are compared with the bounds.
    """
    if (ratio := max(height, width) / min(height, width)) > MAX_RATIO:
        raise InvalidRequestError(
            f"one side is {ratio:.1f} times as long as the other, and this model takes at most {MAX_RATIO}; cut it"
        )
    rows, columns = round(height / side), round(width / side)
    pixels, fitted = count * height * width, counted * rows * columns * side**2
    if fitted > bounds.most:
        factor = math.sqrt(pixels / bounds.most)
        rows = max(1, math.floor(height / factor / side))
        columns = max(1, math.floor(width / factor / side))
    elif fitted < bounds.least:
        factor = math.sqrt(bounds.least / pixels)
        rows, columns = math.ceil(height * factor / side), math.ceil(width * factor / side)
    return rows * side, columns * side


def read_qwen3_5(config: Json, settings: Json) -> Qwen3VLProcessor | None:
    """Return the processor of a Qwen 3.5 model, which has other tokens; None if the model has no encoder.

    Arguments and errors are those of `read_qwen3_vl`.
    """
    if config.get("vision_config") is None:
        return None
    return read_qwen3_vl({f"{name}_token_id": own for name, own in _TOKENS_3_5.items()} | dict(config), settings)


def read_qwen3_vl(config: Json, settings: Json) -> Qwen3VLProcessor:
    """Return the processor of a Qwen 3-VL model.

    Args:
        config: the values of config.json.
        settings: the values of preprocessor_config.json, with those of video_preprocessor_config.json in
                    `video_processor`; or the values of processor_config.json.

    Raises:
        ModelError: the model's pixels are scaled in another way than its encoder expects.
    """
    images, videos = settings.get("image_processor", settings), settings.get("video_processor", {})
    for own in (images, videos):
        if any(value != 0.5 for name in ("image_mean", "image_std") for value in own.get(name) or ()):
            raise ModelError(
                "the image_mean and image_std of this model must be 0.5; correct its preprocessor's config"
            )
    vision = config.get("vision_config") or {}
    start, end, image, video = (config.get(f"{name}_token_id", default) for name, default in _TOKENS.items())
    most_frames = videos.get("max_frames", 768)
    return Qwen3VLProcessor(
        MediaTokens(
            {"image": (start, image, end), "video": (start, video, end)}, frozenset({start, end, image, video})
        ),
        start,
        end,
        image,
        video,
        side=vision.get("patch_size", 16) * vision.get("spatial_merge_size", 2),
        image_bounds=PixelBounds.read(images, 1 << 16, 1 << 24),
        video_bounds=PixelBounds.read(videos, 1 << 12, 24 << 20),
        frames=FrameSampling(most_frames, videos.get("min_frames", 4), videos.get("fps", 2.0), to_end=True),
        frame_limit=most_frames,
        frame_tokens=videos.get("max_video_tokens", 768) if videos.get("cap_pixels_per_frame") else None,
    )


_TOKENS = {"vision_start": 151652, "vision_end": 151653, "image": 151655, "video": 151656}
"""Names of the media tokens in config.json, without `_token_id`, and their ids if a config leaves the names out."""
_TOKENS_3_5 = {"vision_start": 248053, "vision_end": 248054, "image": 248056, "video": 248057}
