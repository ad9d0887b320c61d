"""Decodes videos: sampled frames of a file."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from paceline.services.gateway.planning.media.container import BrokenItemError, open_container
from paceline.services.gateway.planning.media.items import FrameSampling

_MAX_FRAMES = 1_000_000
"""Largest number of frames in a file. Reading the times of so many takes a second."""
_INDEXED_FORMATS = frozenset({"mp4", "matroska", "avi"})
"""Containers with an index, by which key frames are found exactly. Other videos are decoded from their beginning."""


def decode(
    data: memoryview,
    max_bytes: int,
    max_pixels: int,
    max_seconds: float,
    sampling: Mapping[str, Any],
) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Return sampled frames of a video as RGB: [frames, height, width, 3].

    The first returned value has the facts: the frames' `timestamps`, in seconds from the first frame that is shown.

    Args:
        max_bytes: largest size of the array of all frames.
        max_pixels: largest number of pixels of a frame in the file. Larger ones are refused before they are decoded.
        max_seconds: length of the longest video, in seconds.
        sampling: the fields of a `FrameSampling`.

    Raises BrokenItemError, or any error of PyAV.
    """
    wish = FrameSampling(**sampling)
    with _open(data, max_pixels) as (container, stream):
        index = _read_index(container, stream)
    if index.duration > max_seconds:
        raise BrokenItemError(
            f"the video has {index.duration:.0f} seconds, but at most {max_seconds:g} are allowed "
            "(--max-video-seconds); send a part of it"
        )
    numbers = sample(len(index.times), index.rate, wish)
    wanted = [index.times[number] for number in numbers]
    pictures = _Pictures(len(wanted), max_bytes, _frame_pixels(wish, len(wanted), max_pixels))
    with _open(data, max_pixels) as (container, stream):
        timed = index.is_exact
        found = _frames_at(container, stream, wanted, index) if timed else _numbered(container, stream, numbers)
        for frame in found:
            pictures.add(frame)
    array = pictures.array()
    # A broken file may end before its index says so.
    wanted = wanted[: len(array)]
    return {"timestamps": [float((time - index.times[0]) * index.time_base) for time in wanted]}, array


def sample(total: int, rate: float, sampling: FrameSampling) -> list[int]:
    """Return the numbers of the wanted frames of a video, from 0, spread as in transformers.

    Args:
        total: number of frames of the video.
        rate: frames per second of the video.
    """
    most = min(sampling.most, total)
    count = most
    if sampling.per_second is not None:
        count = min(max(int(total / rate * sampling.per_second), sampling.least), most)
    if sampling.to_end:
        return [int(number) for number in np.linspace(0, total - 1, count).round()]
    return [number * total // count for number in range(count)]


def _frame_pixels(sampling: FrameSampling, count: int, max_pixels: int) -> int:
    """Return the largest number of pixels that each of `count` frames may have after scaling."""
    bounds = (max_pixels, sampling.max_pixels, sampling.total_pixels and sampling.total_pixels // count)
    return min(bound for bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class _Index:
    """The times of a file's frames, in units of `time_base` seconds."""

    times: list[int]
    """Times at which frames are shown, ascending, without frames that an edit list hides."""
    key_times: list[int]
    """Times of the frames at which decoding can begin, ascending, hidden frames included."""
    begin: int
    """The decoding time of the first packet, for seeking to the beginning of the video."""
    time_base: Fraction
    duration: float
    """Length of the video in seconds."""
    rate: float
    """Frames per second on average."""
    is_exact: bool
    """Whether packets have the times of their frames. In AVI, packets of H.264's B-frames have decoding times."""


@contextlib.contextmanager
def _open(data: memoryview, max_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Yield a file's container and its first video, ready to be decoded from its beginning."""
    with open_container(data, "a video") as container:
        if not container.streams.video:
            raise BrokenItemError("the file has no video")
        stream = container.streams.video[0]
        if stream.width * stream.height > max_pixels:
            raise BrokenItemError(
                f"its frames have {stream.width} x {stream.height} pixels, but at most {max_pixels} are allowed "
                "(--max-image-pixels); send a smaller video"
            )
        # The size may change in the middle of a stream.
        stream.codec_context.options = {"max_pixels": str(max_pixels)}
        # The process decodes on one core.
        stream.thread_count = 1
        yield container, stream


def _read_index(container: InputContainer, stream: VideoStream) -> _Index:
    """Read the times of all frames without decoding the frames. The file's head may be wrong about them."""
    times: set[int] = set()
    key_times: list[int] = []
    begin: int | None = None
    end, last, is_ordered = 0, None, True
    for number, packet in enumerate(container.demux(stream)):
        if number > _MAX_FRAMES:  # The last packet of any file is empty.
            raise BrokenItemError(f"the video has more than {_MAX_FRAMES} frames; send a part of it")
        time = packet.pts if packet.pts is not None else packet.dts
        if time is None or not packet.size:
            continue
        is_ordered &= last is None or last < time
        last = time
        if begin is None:
            begin = time if packet.dts is None else packet.dts
        if packet.is_keyframe:
            key_times.append(time)
        # A hidden packet is decoded, because others need its frame, but the frame is not shown.
        if not packet.is_discard:
            times.add(time)
            end = max(end, time + (packet.duration or 0))
    if begin is None or not times or not stream.time_base:
        raise BrokenItemError("the video has no frames")
    ordered = sorted(times)
    # Without a duration, the last frame is shown for as long as the others.
    shown = max(end - ordered[0], (ordered[-1] - ordered[0]) * len(ordered) // max(1, len(ordered) - 1))
    duration = float(shown * stream.time_base) or 1 / float(stream.average_rate or 1)
    # What the head says of the rate is more exact than times, which may be in milliseconds. It need not be true.
    rate = float(stream.average_rate or 0) or len(ordered) / duration
    is_exact = not (is_ordered and container.format.name == "avi" and stream.codec_context.has_b_frames)
    return _Index(ordered, sorted(key_times), begin, stream.time_base, duration, rate, is_exact)


def _frames_at(container: InputContainer, stream: VideoStream, times: list[int], index: _Index) -> Iterator[VideoFrame]:
    """Yield the frame that is shown at each of the ascending times, until the file ends.

    Frames between two wanted ones are decoded only if no key frame lies between the two, or the file has no index.
    """
    can_seek = not _INDEXED_FORMATS.isdisjoint(container.format.name.split(","))
    decoded = container.decode(stream)
    position = times[0]
    for time in times:
        key = bisect.bisect_right(index.key_times, time) - 1
        if can_seek and key >= 0 and index.key_times[key] > position:
            begins = (index.key_times[key], index.key_times[max(0, key - 1)], index.begin)
            decoded = _decode_from(container, stream, begins, time)
        frame = next((frame for frame in decoded if frame.pts is None or frame.pts >= time), None)
        if frame is None:
            return
        position = time if frame.pts is None else frame.pts
        yield frame


def _numbered(container: InputContainer, stream: VideoStream, numbers: Sequence[int]) -> Iterator[VideoFrame]:
    """Yield the frames with these ascending numbers. Frames are decoded in the order in which they are shown."""
    wanted = set(numbers)
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            yield frame
        if number >= numbers[-1]:
            return


def _decode_from(
    container: InputContainer, stream: VideoStream, begins: Sequence[int], time: int
) -> Iterator[VideoFrame]:
    """Return the frames from the first place in `begins` at or before the frame of `time`, or from the last place.

    Several places are needed because AVI's index counts frames in the order of decoding: if key frames are close
    together, seeking a key frame by the time when it is shown finds a later one.
    """
    for begin in begins:
        container.seek(begin, stream=stream)
        decoded = container.decode(stream)
        first = next(decoded, None)
        if first is not None and (first.pts is None or first.pts <= time):
            break
    return itertools.chain(() if first is None else (first,), decoded)


def _turns(frame: VideoFrame) -> int:
    """Return the rotation of a shown frame, in right angles to the left."""
    return round(frame.rotation / 90) % 4


class _Pictures:
    """Collects frames as RGB in one array, which is made when the first frame comes.

    Args:
        count: largest number of frames.
        max_bytes: largest size of the array of all frames.
        max_pixels: larger frames are scaled down to this many pixels.
    """

    def __init__(self, count: int, max_bytes: int, max_pixels: int) -> None:
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels
        self._count = count
        self._added = 0
        self._size = (0, 0)
        self._turns = 0
        self._array = np.empty((0, 0, 0, 3), np.uint8)

    def add(self, frame: VideoFrame) -> None:
        """Add a frame, rotated as the file says, in the size of the first frame."""
        if not self._added:
            self._begin(frame)
        turns = _turns(frame)
        width, height = self._size if turns % 2 == self._turns % 2 else self._size[::-1]
        picture = frame.reformat(width, height, "rgb24", interpolation="BICUBIC").to_ndarray()
        self._array[self._added] = np.rot90(picture, turns)
        self._added += 1

    def array(self) -> NDArray[np.uint8]:
        """Return the frames that were added. Raises BrokenItemError if there are none."""
        if not self._added:
            raise BrokenItemError("no frame of the video can be decoded")
        return self._array[: self._added]

    def _begin(self, frame: VideoFrame) -> None:
        scale = min(1.0, math.sqrt(self._max_pixels / (frame.width * frame.height)))
        self._size = max(1, int(frame.width * scale)), max(1, int(frame.height * scale))
        self._turns = _turns(frame)
        width, height = self._size if self._turns % 2 == 0 else self._size[::-1]
        if self._count * width * height * 3 > self._max_bytes:
            raise BrokenItemError(
                f"{self._count} frames of {width} x {height} pixels take too much memory (--media-memory); send a "
                "smaller video"
            )
        self._array = np.empty((self._count, height, width, 3), np.uint8)
