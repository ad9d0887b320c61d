"""Gemma 4: images and frames of any shape within a budget of tokens, and audio."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaInput, MediaKind
from paceline.services.gateway.planning.media.items import (
    SAMPLING_RATE,
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
    MAX_INPUT_BYTES,
    Pixels,
    Processor,
    Samples,
    check_names,
    fitted_clip,
    media_input,
    nested_options,
    resized,
    wrong_option,
)

MELS = 128
_FRAME = 320
_HOP = 160
_FFT = 512
_HIGHEST_HZ = 8000.0
_FLOOR = 1e-3
_LEAD = _FRAME // 2
"""Number of zeros before the first sample. They centre the first frame on this sample."""

Json = Mapping[str, Any]

BUDGETS = (70, 140, 280, 560, 1120)
"""Allowed values of the largest number of tokens of an image."""
FRAME_BUDGET = 70
FRAMES = 32
MEL_SECONDS = 30
"""Longest audio clip, in seconds, for models whose encoder takes log-mel features."""
RAW_SECONDS = MAX_INPUT_BYTES // np.dtype(np.float32).itemsize // SAMPLING_RATE
"""Longest audio clip, in seconds, for models that take raw samples. A message to a worker has no room for more."""
_FRAMES_PER_TOKEN = 4
"""Number of frames of log-mel features for each token of audio."""


def frame_count(samples: int) -> int:
    """Return the number of frames of log-mel features of a clip. A frame counts if one more sample follows it."""
    return max(0, (samples + _LEAD - _FRAME - 1) // _HOP + 1)


def log_mel(samples: Samples) -> NDArray[np.float32]:
    """Return log-mel features [frames, MELS] of a clip: ln(mel + 0.001) of the magnitudes of windowed frames."""
    padded = np.pad(samples, (_LEAD, 0))
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_HOP][: frame_count(len(samples))]
    magnitudes = np.abs(np.fft.rfft(frames * _window(), n=_FFT, axis=-1))
    return np.log(magnitudes @ _filters() + _FLOOR).astype(np.float32)


@functools.cache
def _window() -> NDArray[np.float32]:
    """Return the periodic Hann window by which each frame of samples is multiplied."""
    return np.hanning(_FRAME + 1)[:-1].astype(np.float32)


@functools.cache
def _filters() -> NDArray[np.float64]:
    """Return the triangular mel filters [frequencies, MELS]. Their corners are evenly spaced on HTK's mel scale."""
    corners = _hertz(np.linspace(0.0, _mel(_HIGHEST_HZ), MELS + 2))
    frequencies = np.linspace(0.0, SAMPLING_RATE / 2, _FFT // 2 + 1)
    widths = np.diff(corners)
    distances = corners[None, :] - frequencies[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling))


def _mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return 700.0 * (np.power(10.0, mels / 2595.0) - 1.0)


@dataclass(frozen=True, slots=True)
class Gemma4Processor(Processor):
    """The preprocessing of `Gemma4ForConditionalGeneration` and `Gemma4UnifiedForConditionalGeneration`."""

    tokens: MediaTokens
    token_ids: Mapping[str, int] = dataclasses.field(hash=False)
    """The ids of the media tokens by their names in config.json, without `_token_id`."""
    hears_samples: bool
    """Whether the model takes audio as raw samples, as unified models do; if not, as log-mel features."""
    side: int = 48
    """Side of the square of an image that one token stands for, in pixels."""
    samples_per_token: int = 640
    budget: int = 280
    frame_budget: int = FRAME_BUDGET
    video_frames: int = FRAMES

    def with_options(self, given: Json) -> Gemma4Processor:
        """Return a processor with other options, which have vLLM's names.

        `max_soft_tokens`, also inside `images_kwargs`, is the largest number of tokens of an image. `videos_kwargs` may
        have `max_soft_tokens`, the largest number of tokens of a frame, and `num_frames`, that of frames of a video.
        """
        check_names(given, ("max_soft_tokens", "images_kwargs", "videos_kwargs"))
        images, videos = (nested_options(given, name, known) for name, known in _NESTED.items())
        budget = images.get("max_soft_tokens", given.get("max_soft_tokens", self.budget))
        frame_budget = videos.get("max_soft_tokens", self.frame_budget)
        if any(type(each) is not int or each not in BUDGETS for each in (budget, frame_budget)):
            raise wrong_option(f"max_soft_tokens must be one of {', '.join(map(str, BUDGETS))}")
        frames = videos.get("num_frames", self.video_frames)
        if type(frames) is not int or not 1 <= frames <= FRAMES:
            raise wrong_option(f"num_frames must be from 1 to {FRAMES}")
        return dataclasses.replace(self, budget=budget, frame_budget=frame_budget, video_frames=frames)

    def tokens_of(self, kind: ItemKind, shape: Sequence[int]) -> int:
        if kind == "audio":
            samples = min(shape[0], self.audio_seconds * SAMPLING_RATE)
            return samples // self.samples_per_token if self.hears_samples else _mel_tokens(samples)
        count, budget = (1, self.budget) if kind == "image" else (shape[0], self.frame_budget)
        height, width = shape[-3:-1]
        size = self._fitted(height, width, budget)
        return count * (size.height * size.width // self.side**2)

    @property
    def audio_seconds(self) -> int:
        return RAW_SECONDS if self.hears_samples else MEL_SECONDS

    def fit(self, height: int, width: int) -> ImageSize | None:
        return self._fitted(height, width, self.budget)

    def _fitted(self, height: int, width: int, budget: int) -> ImageSize:
        return ImageSize(*fitted_size(height, width, budget, self.side), Image.Resampling.BICUBIC)

    def image(self, pixels: Pixels, size: tuple[int, int] | None = None) -> Expansion:
        height, width = size or pixels.shape[:2]
        shown = resized(pixels, self._fitted(height, width, self.budget))
        return Expansion(self._picture(shown, MediaKind.IMAGE))

    @property
    def sampling(self) -> FrameSampling:
        return FrameSampling(self.video_frames, max_pixels=MAX_FRAME_PIXELS)

    def video(self, frames: Sequence[Pixels], seconds: Sequence[float]) -> Expansion:
        pieces: list[Piece] = []
        for index, (frame, second) in enumerate(zip(frames, seconds, strict=True)):
            stamp = f"{int(second // 60):02d}:{int(second % 60):02d} "
            shown = resized(frame, self._fitted(frame.shape[0], frame.shape[1], self.frame_budget))
            pieces += [f" {stamp}" if index else stamp, *self._picture(shown, MediaKind.VIDEO_FRAME)]
        return Expansion(tuple(pieces))

    def audio(self, samples: Samples) -> Expansion:
        own = _raw_audio(samples, self.samples_per_token) if self.hears_samples else _mel_audio(samples)
        ids = self.token_ids
        return Expansion((ids["boa"], TokenRun.of(ids["audio"], own), ids["eoa"]))

    def _picture(self, shown: Pixels, kind: MediaKind) -> tuple[Piece, ...]:
        own = media_input(kind, shown.shape[0] * shown.shape[1] // self.side**2, shown)
        ids = self.token_ids
        placeholder = ids["image"] if kind is MediaKind.IMAGE else ids["video"]
        return ids["boi"], TokenRun.of(placeholder, own), ids["eoi"]


_NESTED = {"images_kwargs": ("max_soft_tokens",), "videos_kwargs": ("max_soft_tokens", "num_frames")}


def fitted_size(height: int, width: int, budget: int, side: int = 48) -> tuple[int, int]:
    """Return the height and width, multiples of `side`, of a resized image of about the same shape.

    If the image is so long that its shorter side would round to 0, this side becomes `side`, and the other one becomes
    `side` times the ratio of the image's sides, rounded down.

    Args:
        budget: largest number of squares of `side` pixels, which are tokens.
    """
    factor = math.sqrt(budget * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if rows == 0:
        rows, columns = 1, min(width // height, budget)
    elif columns == 0:
        rows, columns = min(height // width, budget), 1
    return rows * side, columns * side


def _mel_audio(samples: Samples) -> MediaInput:
    samples = fitted_clip(samples, MEL_SECONDS)
    if frame_count(len(samples)) == 0:
        raise InvalidRequestError("an audio clip is shorter than a hundredth of a second; send a longer one")
    return media_input(MediaKind.AUDIO, _mel_tokens(len(samples)), log_mel(samples))


def _mel_tokens(samples: int) -> int:
    return -(-frame_count(samples) // _FRAMES_PER_TOKEN)


def _raw_audio(samples: Samples, per_token: int) -> MediaInput:
    if len(samples) == 0:
        raise InvalidRequestError("an audio clip has no samples; send a longer one")
    samples = fitted_clip(samples, RAW_SECONDS)
    length = -(-len(samples) // per_token)
    padded = np.pad(samples, (0, length * per_token - len(samples)))
    return media_input(MediaKind.AUDIO, length, padded.astype(np.float32))


_TOKENS: dict[str, tuple[Sequence[str], int]] = {
    "image": (("image_token_id",), 258880),
    "boi": (("boi_token_id",), 255999),
    "eoi": (("eoi_token_id",), 258882),
    "video": (("video_token_id",), 258884),
    "audio": (("audio_token_id",), 258881),
    "boa": (("boa_token_id",), 256000),
    # The name that released models have, and the one that transformers writes.
    "eoa": (("eoa_token_id", "eoa_token_index"), 258883),
}
"""Names of the media tokens in config.json, and their ids if a config leaves the names out."""


def read_gemma4(config: Json, settings: Json) -> Gemma4Processor | None:
    """Return the processor of a Gemma 4 model; None if the model has no encoders.

    Args:
        config: the values of config.json.
        settings: the values of processor_config.json or preprocessor_config.json.

    Raises:
        ModelError: the model's own budget of tokens of an image is not one of BUDGETS.
    """
    ids = {own: _token_id(config, names, default) for own, (names, default) in _TOKENS.items()}
    markers: dict[ItemKind, tuple[int, ...]] = {}
    if config.get("vision_config") is not None:
        markers |= {"image": (ids["image"],), "video": (ids["video"],)}
    if config.get("audio_config") is not None:
        markers["audio"] = (ids["audio"],)
    if not markers:
        return None
    budget = settings.get("image_processor", settings).get("max_soft_tokens", 280)
    if budget not in BUDGETS:
        raise ModelError(f"the model's max_soft_tokens is {budget!r}, but must be one of {BUDGETS}; correct its config")
    vision, audio = config.get("vision_config") or {}, config.get("audio_config") or {}
    return Gemma4Processor(
        MediaTokens(markers, frozenset(ids.values())),
        ids,
        hears_samples=config.get("model_type") == "gemma4_unified",
        side=vision.get("patch_size", 16) * vision.get("pooling_kernel_size", 3),
        samples_per_token=audio.get("audio_embed_dim", 640),
        budget=budget,
    )


def _token_id(config: Json, names: Sequence[str], default: int) -> int:
    return next((int(config[name]) for name in names if config.get(name) is not None), default)
