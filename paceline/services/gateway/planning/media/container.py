"""Opens files of videos and audio with FFmpeg's libraries, which may open no other file or address."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import av
import av.logging
from av.container import InputContainer

from paceline.services.gateway.planning.media.items import JPEG


class BrokenItemError(Exception):
    """An item cannot be decoded. The message says what is wrong with it and what to do."""


def check_not_text(data: memoryview, kind: str) -> None:
    """Raise BrokenItemError if data is a text, such as the page that a server sends instead of a file."""
    begin = bytes(data[:512]).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not begin:
        raise BrokenItemError("the file is empty")
    if begin.startswith(b"<svg") or (begin.startswith(b"<?xml") and b"<svg" in begin):
        raise BrokenItemError("SVG images are not supported; send a PNG, JPEG, WebP, GIF or BMP file")
    if begin.startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise BrokenItemError(f"this is a web page and not {kind}; send the URL of the file itself")


_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,wav,flac,mp3,aac,aiff,caf,gif"
"""Allowed formats of containers. Playlists (hls, dash, concat) are left out: FFmpeg would open the files in them."""
_JPEG_FRAMES_FORMAT, _JPEG_FRAMES_PER_SECOND = "mjpeg", "1"
"""FFmpeg's format and rate for a video that is a sequence of JPEG files. vLLM takes the same rate."""


@contextlib.contextmanager
def open_container(data: memoryview, kind: str) -> Iterator[InputContainer]:
    """Yield a container that reads from `data`. FFmpeg may open nothing else.

    Args:
        kind: what the file should be, with its article, for errors.

    Raises BrokenItemError if the container cannot be opened, or if FFmpeg finds an error while the block runs.
    """
    check_not_text(data, kind)
    av.logging.set_level(None)
    # Only the bytes reach the process that decodes.
    are_frames = bytes(data[: len(JPEG)]) == JPEG
    options = {"framerate": _JPEG_FRAMES_PER_SECOND} if are_frames else {"format_whitelist": _FORMATS}
    try:
        with av.open(
            io.BytesIO(data),
            "r",
            format=_JPEG_FRAMES_FORMAT if are_frames else None,
            options=options,
            metadata_errors="replace",
            io_open=_refuse,
        ) as container:
            yield container
    except av.error.FFmpegError as error:
        if isinstance(error, av.error.MemoryError):
            raise MemoryError from None
        raise BrokenItemError(f"the file is broken, or is not {kind} ({error.strerror})") from None


def _refuse(url: str, flags: int, options: object) -> None:
    """Refuse to open a file or an address that a container refers to."""
    raise BrokenItemError("the file refers to other files, which are not read; send one complete file")
