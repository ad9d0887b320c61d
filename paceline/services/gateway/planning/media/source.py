"""Reads the bytes of an item from its URL: data:, file:, http: or https:."""

from __future__ import annotations

import asyncio
import binascii
import concurrent.futures
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline.services.gateway.http.errors import MediaError, UnreachableMediaError
from paceline.services.gateway.planning.media.body import Take
from paceline.services.gateway.planning.media.fetch import Fetcher
from paceline.services.gateway.planning.media.items import JPEG

_BASE64_CHARACTERS = 1 << 20
"""Number of base64 characters that are decoded at once, a multiple of 4. Other requests wait meanwhile."""
_QUOTED = {"%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "=", "%2C": ",", "%2c": ","}
"""Percent-encodings that a data: URL may have in its base64 text, and their characters."""
_BREAKS = dict.fromkeys(("\r", "\n", "%0D", "%0d", "%0A", "%0a"), "")
"""Line breaks, which many programs write into base64."""
_JPEG_FRAMES = ("data:video/jpeg;", "data:video/jpg;")
"""Beginnings of the data: URL of a video that is sent as JPEG files with commas between them, which vLLM allows."""


class MediaSources:
    """Reads items from all sources.

    Args:
        threads: threads for reading files, because reading may block.
        folder: the only folder below which files may be read; "" forbids file: URLs.
    """

    def __init__(self, fetcher: Fetcher, threads: concurrent.futures.Executor, folder: str) -> None:
        self._fetcher = fetcher
        self._threads = threads
        self._folder = folder

    async def read(self, url: str, seconds: float, take: Take) -> bytes | bytearray:
        """Return the bytes of the item at a URL within `seconds`, after `take` has counted them.

        Raises MediaError, and whatever `take` raises.
        """
        url = url.strip()
        scheme = url[:5].lower()
        if scheme == "data:":
            data: bytes | bytearray = await read_data_url(url, self._fetcher.max_bytes)
        elif scheme == "file:":
            data = await self._read_file(url, seconds)
        else:
            return await self._fetcher.fetch(url, seconds, take)
        take(len(data))
        return data

    async def _read_file(self, url: str, seconds: float) -> bytes:
        path = file_path(url, self._folder)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                return await loop.run_in_executor(
                    self._threads, read_file, path, Path(self._folder), self._fetcher.max_bytes
                )
        except TimeoutError:
            raise UnreachableMediaError(f"the file could not be read within {seconds:g} seconds") from None


async def read_data_url(url: str, max_bytes: int) -> bytearray:
    """Return the contents of a data: URL in base64. Raises MediaError if it is malformed or too large.

    The JPEG files of a video that is sent as such are joined, which makes a video in the format MJPEG.
    """
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError("a data: URL must be in base64, such as data:image/png;base64,iVBORw0KGgo=")
    # Other characters need no quotes in base64, and decoding all of them would stop other requests for seconds.
    for quoted, character in (_QUOTED | _BREAKS).items():
        text = text.replace(quoted, character)
        await asyncio.sleep(0)
    if len(text) * 3 // 4 - text[-2:].count("=") > max_bytes:
        raise MediaError(f"the data: URL has more than {max_bytes} bytes (--max-media-size); send a smaller file")
    if not head.lower().startswith(_JPEG_FRAMES):
        return await _decode(text)
    video = bytearray()
    for number, frame in enumerate(text.split(","), 1):
        data = await _decode(frame)
        if not data.startswith(JPEG):
            raise MediaError(f"frame {number} of the data: URL is not a JPEG file, as all frames of video/jpeg must be")
        video += data
    return video


async def _decode(text: str) -> bytearray:
    data = bytearray()
    try:
        for start in range(0, len(text), _BASE64_CHARACTERS):
            data += binascii.a2b_base64(text[start : start + _BASE64_CHARACTERS], strict_mode=True)
            await asyncio.sleep(0)
    except ValueError as error:
        told = "send standard base64, with + and /, and = at its end"
        if "," in text:
            told = "only data:video/jpeg may have several files with commas between them"
        raise MediaError(f"the data: URL is not valid base64 ({error}); {told}") from None
    return data


def file_path(url: str, folder: str) -> Path:
    """Return the path that a file: URL names. Raises MediaError if it is malformed, or there is no `folder`."""
    if not folder:
        raise MediaError("file: URLs are not allowed here (--allowed-local-media-path); send a data: URL")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise MediaError(f"the URL is not valid: {error}") from None
    path = unquote(parts.path, errors="surrogateescape")
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise MediaError("a file: URL must have an absolute path and no host, such as file:///media/cat.png")
    return Path(path)


def read_file(path: Path, folder: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file below a folder. Symbolic links may not lead out of the folder.

    Raises MediaError if there is no such file, or if the file is too large.
    """
    # The message is the same whether a file exists or not, because clients may not look for files elsewhere.
    refused = MediaError("there is no such file below --allowed-local-media-path")
    try:
        folder, path = folder.resolve(strict=True), path.resolve(strict=True)
        if not path.is_file():
            raise refused
        file = open(_open_below(folder, path.relative_to(folder)), "rb")  # noqa: SIM115
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise refused
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise MediaError(f"the file is larger than {max_bytes} bytes (--max-media-size); send a smaller one")
    return data


def _open_below(folder: Path, inner: Path) -> int:
    """Open a file without following links, and return its descriptor.

    A link may have been made after the path was resolved.
    """
    current = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for number, name in enumerate(inner.parts, 1):
        kind = os.O_NONBLOCK if number == len(inner.parts) else os.O_DIRECTORY
        try:
            following = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current
