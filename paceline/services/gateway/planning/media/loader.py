"""Loads the items of requests: fetches their bytes, and has them decoded in other processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, ConfigError
from paceline.core.options import parse_bytes
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.body import Take
from paceline.services.gateway.planning.media.budget import MemoryBudget, RequestBudget
from paceline.services.gateway.planning.media.channel import Facts
from paceline.services.gateway.planning.media.fetch import Fetcher, Resolver, SystemResolver
from paceline.services.gateway.planning.media.guard import MediaGuard
from paceline.services.gateway.planning.media.items import SAMPLING_RATE, Fit, FrameSampling, ItemKind
from paceline.services.gateway.planning.media.metrics import MediaMetrics
from paceline.services.gateway.planning.media.pool import DecodePool
from paceline.services.gateway.planning.media.source import MediaSources

T = TypeVar("T")

_MAX_READING = 256
"""Largest number of items, over all requests, that are read at the same time. Each may need a connection."""
_MAX_READING_OF_REQUEST = 8
"""Largest number of items of one request that are read at the same time."""
_THREADS = 16
"""Threads for resolving names and reading files, because both calls block."""


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames of a video."""

    frames: NDArray[np.uint8]
    """RGB, [frames, height, width, 3]."""
    timestamps: NDArray[np.float64]
    """Time at which each frame is shown, in seconds from the video's first shown frame; [frames]."""


class MediaService:
    """Loads media for all requests: reads items, and has them decoded and preprocessed.

    Args:
        resolve: returns the addresses of a server; None for the system's resolver.
        metrics: counts the items; None counts them where nobody sees.

    Raises ConfigError if `--allowed-local-media-path` is not a folder.
    """

    def __init__(
        self, config: GatewayConfig, resolve: Resolver | None = None, metrics: MediaMetrics | None = None
    ) -> None:
        self.config = config
        self.metrics = metrics or MediaMetrics()
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "media")
        self._processing = concurrent.futures.ThreadPoolExecutor(config.media_processes, "preprocess")
        self._reading = 0
        folder = config.allowed_local_media_path
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"--allowed-local-media-path {folder} is not a folder")
        guard = MediaGuard(config.allowed_media_domains, config.allow_private_media)
        self._fetcher = Fetcher(guard, resolve or SystemResolver(self._threads), parse_bytes(config.max_media_size))
        self._sources = MediaSources(self._fetcher, self._threads, folder)
        self.memory = MemoryBudget(parse_bytes(config.media_memory), config.media_processes)
        self.pool = DecodePool(config, self.memory)

    async def read(self, kind: ItemKind, source: str, take: Take) -> bytes | bytearray:
        """Read an item from its URL `source`. Return its bytes after `take` has counted them.

        Raises MediaError, BusyError if too many items are being read, and whatever `take` raises.
        """
        if self._reading >= _MAX_READING:
            raise BusyError("too many images, videos and audio clips are being fetched; try again later")
        seconds = {
            "image": self.config.image_fetch_seconds,
            "video": self.config.video_fetch_seconds,
            "audio": self.config.audio_fetch_seconds,
        }[kind]
        self._reading += 1
        try:
            return await self._sources.read(source, seconds, take)
        finally:
            self._reading -= 1

    async def preprocess(self, compute: Callable[..., T], *arguments: object) -> T:
        """Run `compute` with its arguments in a thread of its own pool, and return its result.

        The pool has as many threads as processes decode. So preprocessing for many requests takes neither all cores nor
        the threads that plan other requests.

        Raises BusyError after `--media-decode-seconds`, because other requests wait for these threads, too.
        """
        try:
            async with asyncio.timeout(self.config.media_decode_seconds):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._processing, compute, *arguments)
        except TimeoutError:
            raise BusyError("other images, videos and audio clips are being prepared; try again later") from None

    async def close(self) -> None:
        """End the processes that decode. Items that are being loaded fail."""
        await self.pool.close()
        self._processing.shutdown(wait=False, cancel_futures=True)
        self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class MediaLoader:
    """Loads the items of one request.

    Each method takes the URL of an item (`http:`, `https:`, `data:` or `file:`) and the item's name in errors, such as
    "image 2". Several calls may run at the same time. If a call is cancelled, the download stops and the process that
    decodes the item is killed.

    Args:
        budget: counts the files until they are decoded, and the arrays. The caller gives an array's bytes back.

    Every method raises:
        MediaError: the item is refused, broken or too large (status 400), or its URL cannot be read (status 422).
        BusyError: too many items are being loaded; the same request may succeed later.
        UnavailableError: the process that decodes cannot be started.
    """

    def __init__(self, service: MediaService, budget: RequestBudget) -> None:
        self._service = service
        self._budget = budget
        self._reading = asyncio.Semaphore(_MAX_READING_OF_REQUEST)
        # The items of one request leave a process free for others.
        self._decoding = asyncio.Semaphore(max(1, service.config.media_processes - 1))

    async def image(self, source: str, place: str, fit: Fit | None = None) -> NDArray[np.uint8]:
        """Return an image as RGB, [height, width, 3].

        The image is turned as its EXIF orientation says, transparent parts are white, and only the first frame of an
        animation is read.

        Args:
            fit: returns the size to which the decoding process resizes the image. It runs in a thread; its
                InvalidRequestError is raised here.
        """
        options = {"max_pixels": self._service.config.max_image_pixels}
        _, pixels = await self._load("image", source, place, options, fit)
        return pixels

    async def video(self, source: str, place: str, sampling: FrameSampling) -> Video:
        """Return the wanted frames of a video, rotated as the file says."""
        config = self._service.config
        options = {
            "max_pixels": config.max_image_pixels,
            "max_seconds": config.max_video_seconds,
            "sampling": asdict(sampling),
        }
        facts, frames = await self._load("video", source, place, options)
        return Video(frames, facts["timestamps"])

    async def audio(self, source: str, place: str, model_seconds: float = math.inf) -> NDArray[np.float32]:
        """Return an audio clip at SAMPLING_RATE, [samples], as the mean of its channels. Full scale is -1 to 1.

        Args:
            model_seconds: longest clip that the model takes, in seconds. A longer one is refused while it is decoded.
        """
        seconds, because = min(
            (self._service.config.max_audio_seconds, "--max-audio-seconds"),
            (model_seconds, "the most that this model takes"),
        )
        options = {"max_seconds": seconds, "because": because, "sample_rate": SAMPLING_RATE}
        _, samples = await self._load("audio", source, place, options)
        return samples

    async def _load(
        self, kind: ItemKind, source: str, place: str, options: dict[str, Any], fit: Fit | None = None
    ) -> tuple[Facts, NDArray[Any]]:
        """Read and decode an item. Return the decoder's facts about it, and its array."""
        metrics = self._service.metrics
        try:
            with self._budget.temporary() as take:
                async with self._reading:
                    with metrics.counted(kind, "fetch"):
                        data = await self._service.read(kind, source, take)
                    metrics.count_bytes(kind, len(data))
                async with self._decoding:
                    with metrics.counted(kind, "decode"):
                        return await self._service.pool.decode(kind, data, options, self._budget, fit)
        except MediaError as error:
            raise type(error)(f"{place}: {error}", place) from None
