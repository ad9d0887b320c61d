"""The base class of processors, and functions that several families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import InvalidRequestError
from paceline.core.media import MediaInput, MediaKind
from paceline.services.common.rpc import MAX_MESSAGE_BYTES
from paceline.services.gateway.planning.media.items import (
    SAMPLING_RATE,
    Expansion,
    FrameSampling,
    ImageSize,
    ItemKind,
    MediaTokens,
)

Pixels = NDArray[np.uint8]
"""An image or a frame as RGB: [height, width, 3]."""
Samples = NDArray[np.float32]
"""Audio at SAMPLING_RATE: [samples], mono, from -1 to 1."""

MAX_INPUT_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Largest size of an encoder's input, in bytes. One message to the worker must hold the input and its other fields."""
PADDING_SECONDS = 0.1
"""Largest number of seconds of audio that are cut without an error, because MP3 and AAC make clips longer by
padding."""
MAX_FRAME_PIXELS = 1 << 22
"""Largest number of pixels of a video's frame. Larger frames are scaled down when they are decoded."""
OPTIONS_FIELD = "mm_processor_kwargs"
"""The field of a request with a processor's options."""


class Processor(ABC):
    """The preprocessing of one model. It is immutable and may be used by several threads.

    All sizes that a processor computes are bounded by the model's limits, however large an item is. If a model takes no
    videos or no audio (see `kinds`), its processor leaves out the methods for them.
    """

    tokens: MediaTokens

    @property
    def kinds(self) -> frozenset[ItemKind]:
        """The kinds of items that the model takes."""
        return frozenset(self.tokens.markers)

    @abstractmethod
    def with_options(self, given: Mapping[str, Any]) -> Self:
        """Return a processor with these options. Raises InvalidRequestError if an option is unknown or wrong."""

    @abstractmethod
    def tokens_of(self, kind: ItemKind, shape: Sequence[int]) -> int:
        """Return the smallest number of placeholder tokens of an item, from its size alone.

        The number serves to refuse an item that no prompt has room for before its pixels are resized.

        Args:
            shape: [height, width, 3] of an image, [samples] of audio, or [frames, height, width, 3] of a video.

        Raises InvalidRequestError if the model takes no item of this size.
        """

    @property
    def audio_seconds(self) -> int:
        """Length of the longest audio clip that the model takes, in seconds."""
        raise NotImplementedError

    @abstractmethod
    def fit(self, height: int, width: int) -> ImageSize | None:
        """Return the size to which an image of this height and width is resized; None if it keeps its size.

        Raises InvalidRequestError if the model takes no image of this size.
        """

    @abstractmethod
    def image(self, pixels: Pixels, size: tuple[int, int] | None = None) -> Expansion:
        """Return the expansion of an image: the tokens that stand for it in a prompt.

        Args:
            pixels: the image, perhaps resized as `fit` says.
            size: the image's own height and width; None if `pixels` were not resized.
        """

    @property
    def sampling(self) -> FrameSampling:
        """The frames of a video that the model's preprocessing wants."""
        raise NotImplementedError

    def video(self, frames: Sequence[Pixels], seconds: Sequence[float]) -> Expansion:
        """Return the expansion of a video: the tokens that stand for it in a prompt.

        Args:
            frames: the frames that `sampling` wants, in order and all of the same size.
            seconds: the time of each frame, in seconds from the video's beginning.
        """
        raise NotImplementedError

    def audio(self, samples: Samples) -> Expansion:
        """Return the expansion of an audio clip at SAMPLING_RATE. Raises InvalidRequestError if it is too long."""
        raise NotImplementedError


def resized(pixels: Pixels, size: ImageSize) -> Pixels:
    """Return an image resized to `size`; the image itself if it has this size."""
    if pixels.shape[:2] == (size.height, size.width):
        return pixels
    filter = Image.Resampling(size.resample)
    return np.asarray(Image.fromarray(pixels).resize((size.width, size.height), filter))


def fitted_clip(samples: Samples, most_seconds: int) -> Samples:
    """Return an audio clip of at most `most_seconds`. Up to PADDING_SECONDS are cut from its end.

    Raises InvalidRequestError if more would have to be cut.
    """
    seconds = len(samples) / SAMPLING_RATE
    if seconds > most_seconds + PADDING_SECONDS:
        raise InvalidRequestError(
            f"an audio clip has {seconds:.1f} seconds, and this model takes at most {most_seconds}; send shorter clips"
        )
    return samples[: most_seconds * SAMPLING_RATE]


def media_input(kind: MediaKind, length: int, values: NDArray[Any]) -> MediaInput:
    """Return values as an encoder's input. Raises InvalidRequestError if they do not fit into a message to a worker."""
    if values.nbytes > MAX_INPUT_BYTES:
        raise InvalidRequestError(
            f"it takes {values.nbytes} bytes for the model, and at most {MAX_INPUT_BYTES} can be sent to a worker; "
            "send a smaller one"
        )
    return MediaInput(kind, length, values.dtype.name, values.shape, np.ascontiguousarray(values).tobytes())


def check_names(given: Mapping[str, Any], known: Sequence[str], place: str = OPTIONS_FIELD) -> None:
    """Raise InvalidRequestError if an option is not one of the `known` ones."""
    if unknown := [name for name in given if name not in known]:
        message = f"{place}: this model has no option {unknown[0]!r:.80}; it has {', '.join(known)}"
        raise InvalidRequestError(message, place)


def nested_options(given: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the options in a field such as `images_kwargs`. Raises InvalidRequestError if one is not `known`."""
    options = given.get(name)
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise wrong_option(f"{name} must be an object")
    check_names(options, known, f"{OPTIONS_FIELD}.{name}")
    return options


def wrong_option(message: str) -> InvalidRequestError:
    """Return the error for an option of OPTIONS_FIELD with a wrong value."""
    return InvalidRequestError(f"{OPTIONS_FIELD}: {message}", OPTIONS_FIELD)
