"""The base class of processors."""

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
"""[height, width, 3], RGB."""
Samples = NDArray[np.float32]
"""[samples], mono, from -1 to 1."""

MAX_INPUT_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Size of the largest input of an encoder. It goes to the worker in one message, which has other fields, too."""
PADDING_SECONDS = 0.1
"""Largest number of seconds of audio that are cut without an error, because MP3 and AAC make clips longer by
padding."""
MAX_FRAME_PIXELS = 1 << 22
"""Larger frames of videos are scaled down when they are decoded."""
OPTIONS_FIELD = "mm_processor_kwargs"
"""The field of a request with a processor's options."""


class Processor(ABC):
    """The preprocessing of one model. It is immutable and may be used by several threads.

    All sizes that a processor computes from an item are bounded by the model's own, whatever the item's size is. If a
    model takes no videos or no audio (see `kinds`), its processor leaves out their methods, and nobody calls them.
    """

    tokens: MediaTokens

    @property
    def kinds(self) -> frozenset[ItemKind]:
        """The kinds of items that the model takes."""
        return frozenset(self.tokens.markers)

    @abstractmethod
    def with_options(self, given: Mapping[str, Any]) -> Self:
        """Return a processor with other options. Raises InvalidRequestError if it has no such option."""

    @abstractmethod
    def tokens_of(self, kind: ItemKind, shape: Sequence[int]) -> int:
        """Return the fewest placeholder tokens that stand for an item, from its size alone.

        So an item that no prompt has room for is refused before its pixels are resized.

        Args:
            shape: that of an image or of samples, or [frames, height, width, 3] of a video.

        Raises InvalidRequestError if the model takes no item of this size.
        """

    @property
    def audio_seconds(self) -> int:
        """The longest audio clip that the model takes, in seconds."""
        raise NotImplementedError

    @abstractmethod
    def fit(self, height: int, width: int) -> ImageSize | None:
        """Return the size to which an image of this size is resized; None if all of its pixels are needed.

        Raises InvalidRequestError if the model takes no image of this size.
        """

    @abstractmethod
    def image(self, pixels: Pixels, size: tuple[int, int] | None = None) -> Expansion:
        """Return what stands in a prompt for an image.

        Args:
            pixels: those of the image, or the image resized as `fit` says.
            size: height and width of the image, if `pixels` were resized.
        """

    @property
    def sampling(self) -> FrameSampling:
        """The frames of a video that the model sees."""
        raise NotImplementedError

    def video(self, frames: Sequence[Pixels], seconds: Sequence[float]) -> Expansion:
        """Return what stands in a prompt for a video.

        Args:
            frames: those of `sampling`, in order and all of the same size.
            seconds: the time of each frame from the beginning.
        """
        raise NotImplementedError

    def audio(self, samples: Samples) -> Expansion:
        """Return what stands in a prompt for audio of SAMPLING_RATE. Raises InvalidRequestError if it is too long."""
        raise NotImplementedError


def resized(pixels: Pixels, size: ImageSize) -> Pixels:
    """Return an image of another size, or the same image if it has this size."""
    if pixels.shape[:2] == (size.height, size.width):
        return pixels
    filter = Image.Resampling(size.resample)
    return np.asarray(Image.fromarray(pixels).resize((size.width, size.height), filter))


def fitted_clip(samples: Samples, most_seconds: int) -> Samples:
    """Return a clip of at most `most_seconds`, without up to PADDING_SECONDS of its end.

    Raises InvalidRequestError if the clip is longer.
    """
    seconds = len(samples) / SAMPLING_RATE
    if seconds > most_seconds + PADDING_SECONDS:
        raise InvalidRequestError(
            f"an audio clip has {seconds:.1f} seconds, and this model takes at most {most_seconds}; send shorter clips"
        )
    return samples[: most_seconds * SAMPLING_RATE]


def media_input(kind: MediaKind, length: int, values: NDArray[Any]) -> MediaInput:
    """Return values as the input of an encoder. Raises InvalidRequestError if no message to a worker can hold them."""
    if values.nbytes > MAX_INPUT_BYTES:
        raise InvalidRequestError(
            f"it takes {values.nbytes} bytes for the model, and at most {MAX_INPUT_BYTES} can be sent to a worker; "
            "send a smaller one"
        )
    return MediaInput(kind, length, values.dtype.name, values.shape, np.ascontiguousarray(values).tobytes())


def check_names(given: Mapping[str, Any], known: Sequence[str], place: str = OPTIONS_FIELD) -> None:
    """Raise InvalidRequestError if there are options that a processor does not have."""
    if unknown := [name for name in given if name not in known]:
        message = f"{place}: this model has no option {unknown[0]!r:.80}; it has {', '.join(known)}"
        raise InvalidRequestError(message, place)


def nested_options(given: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the options in a field such as `images_kwargs`. Raises InvalidRequestError if it has others than known."""
    options = given.get(name)
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise wrong_option(f"{name} must be an object")
    check_names(options, known, f"{OPTIONS_FIELD}.{name}")
    return options


def wrong_option(message: str) -> InvalidRequestError:
    """Return the error for an option with a wrong value."""
    return InvalidRequestError(f"{OPTIONS_FIELD}: {message}", OPTIONS_FIELD)
