"""Items of a request become arrays, and errors name the item."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client import CollectorRegistry

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, ConfigError
from paceline.services.gateway.http.errors import MediaError, UnreachableMediaError, to_api_error
from paceline.services.gateway.planning.media import loader as loader_module
from paceline.services.gateway.planning.media.items import FrameSampling
from paceline.services.gateway.planning.media.loader import MediaLoader, MediaService
from paceline.services.gateway.planning.media.metrics import MediaMetrics
from tests.services.gateway.conftest import eventually
from tests.services.gateway.planning.media.hostile_server import answer, repeat, response, serve
from tests.services.gateway.planning.media.samples import audio_file, data_url, image_file, picture, video_file

PLACE = "image 2"
FILE = image_file()


async def resolve(host: str, /) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.fixture
async def service() -> AsyncIterator[MediaService]:
    service = MediaService(GatewayConfig(allow_private_media=True), resolve)
    yield service
    assert service.memory.used == 0
    await service.close()


@contextlib.contextmanager
def loader_of(service: MediaService) -> Iterator[MediaLoader]:
    """Yield a loader for one request."""
    with service.memory.request() as budget:
        yield MediaLoader(service, budget)


async def test_loads_all_kinds(service: MediaService) -> None:
    with loader_of(service) as loader:
        image, video, clip = await asyncio.gather(
            loader.image(data_url(FILE, "image/png"), PLACE),
            loader.video(data_url(video_file()), PLACE, FrameSampling(4)),
            loader.audio(data_url(audio_file()), PLACE),
        )
        assert (image.shape, image.dtype) == ((4, 6, 3), np.uint8)
        assert video.frames.shape == (4, 16, 32, 3)
        assert video.timestamps == pytest.approx([0.0, 0.5, 1.0, 1.5])
        assert (clip.shape, clip.dtype) == ((8000,), np.float32)
        assert service.memory.used == image.nbytes + video.frames.nbytes + clip.nbytes


async def test_loads_from_server(service: MediaService) -> None:
    async with serve({"/": answer(response(FILE))}) as server:
        with loader_of(service) as loader:
            assert (await loader.image(server.url(), PLACE)).shape == (4, 6, 3)


async def test_error_names_the_place(service: MediaService) -> None:
    page = answer(response(b"<html>not found</html>"))
    async with serve({"/page": page, "/dead": answer(response(b"", "404 Not Found"))}) as server:
        with loader_of(service) as loader:
            with pytest.raises(MediaError, match="web page") as refused:
                await loader.image(server.url("/page"), PLACE)
            with pytest.raises(UnreachableMediaError, match="404") as dead:
                await loader.image(server.url("/dead"), PLACE)
    for error, status in ((refused.value, 400), (dead.value, 422)):
        answered = to_api_error(error)
        assert answered.status == status
        assert answered.body["error"]["param"] == PLACE
        assert str(answered).startswith(f"{PLACE}: ")


async def test_items_are_counted_by_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    service = MediaService(GatewayConfig(), metrics=MediaMetrics(registry))

    def count(phase: str, outcome: str) -> float:
        labels = {"kind": "image", "phase": phase, "outcome": outcome}
        return registry.get_sample_value("paceline:media_items_total", labels) or 0

    with loader_of(service) as loader:
        await loader.image(data_url(FILE), PLACE)
        with pytest.raises(MediaError):
            await loader.image(data_url(b"no image"), PLACE)
        with pytest.raises(MediaError):
            await loader.image("ftp://host/x", PLACE)
        monkeypatch.setattr(loader_module, "_MAX_READING", 0)
        with pytest.raises(BusyError):
            await loader.image(data_url(FILE), PLACE)
    assert [count("fetch", outcome) for outcome in ("ok", "refused", "busy", "failed")] == [2, 1, 1, 0]
    assert [count("decode", outcome) for outcome in ("ok", "refused", "busy", "failed")] == [1, 1, 0, 0]
    read = registry.get_sample_value("paceline:media_bytes_total", {"kind": "image"})
    assert read == len(FILE) + len(b"no image")
    await service.close()


async def test_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        MediaService(GatewayConfig(allowed_local_media_path=str(tmp_path / "missing")))


async def test_gateway_reads_limited_items_at_once(service: MediaService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_MAX_READING", 0)
    with loader_of(service) as loader, pytest.raises(BusyError, match="try again later"):
        await loader.image(data_url(FILE), PLACE)


async def test_request_has_limited_memory() -> None:
    service = MediaService(GatewayConfig(media_memory="4MiB"))
    large = data_url(image_file("PNG", picture(500, 500)))  # takes 750,000 bytes
    with loader_of(service) as loader:
        for _ in range(2):
            await loader.image(large, PLACE)
        with pytest.raises(MediaError, match="--media-memory"):
            await loader.image(large, PLACE)
    assert service.memory.used == 0
    await service.close()


async def test_hostile_items_cost_nobody_memory(service: MediaService) -> None:
    bad = [b"", b"\x00" * 1000, FILE[:50], b"<svg/>", video_file()[:700], audio_file()[:100]]

    async def attack() -> None:
        with loader_of(service) as loader:
            for data in bad:
                with pytest.raises(MediaError):
                    await loader.image(data_url(data), PLACE)

    await attack()
    before = psutil.Process().memory_info().rss
    for _ in range(50):
        await attack()
    assert psutil.Process().memory_info().rss - before < 8 << 20


async def test_cancelled_request_gives_back_its_memory(service: MediaService) -> None:
    async with serve({"/": repeat(response(Content_Length="100000"), b"a", 0.01)}) as server:

        async def load() -> None:
            with loader_of(service) as loader:
                await loader.image(server.url(), PLACE)

        task = asyncio.create_task(load())
        await eventually(lambda: server.open == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert service.memory.used == 0
