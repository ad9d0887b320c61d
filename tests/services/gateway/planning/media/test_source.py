"""Items come from data: URLs, and from files below one folder."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.http.errors import MediaError, UnreachableMediaError
from paceline.services.gateway.planning.media.fetch import Fetcher, SystemResolver
from paceline.services.gateway.planning.media.guard import MediaGuard
from paceline.services.gateway.planning.media.items import JPEG
from paceline.services.gateway.planning.media.source import MediaSources, read_data_url

MAX_BYTES = 1 << 20


@pytest.fixture
def threads() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file, beside a secret."""
    folder = tmp_path / "media"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    return folder


async def read(url: str, threads: concurrent.futures.Executor, folder: Path | str, seconds: float = 20.0) -> bytes:
    fetcher = Fetcher(MediaGuard(), SystemResolver(threads), MAX_BYTES)
    taken: list[int] = []
    data = await MediaSources(fetcher, threads, str(folder)).read(url, seconds, taken.append)
    assert sum(taken) == len(data)
    return bytes(data)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 800_000, MAX_BYTES])
async def test_reads_data_url(size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    for head in ("data:;base64,", "data:image/png;base64,", "DATA:audio/wav;rate=8;BASE64,"):
        assert await read_data_url(head + base64.b64encode(data).decode(), MAX_BYTES) == data


async def test_base64_may_have_line_breaks() -> None:
    data = bytes(range(256))
    broken = base64.encodebytes(data).decode()
    for text in (broken, broken.replace("\n", "\r\n"), broken.replace("\n", "%0A")):
        assert await read_data_url(f"data:image/png;base64,{text}", MAX_BYTES) == data


async def test_frames_of_a_video_follow_each_other() -> None:
    frames = [JPEG, JPEG + b"b", JPEG + b"cd"]
    text = ",".join(base64.b64encode(frame).decode() for frame in frames)
    for url in (f"data:video/jpeg;base64,{text}", f"data:video/jpg;base64,{text.replace(',', '%2C')}"):
        assert await read_data_url(url, MAX_BYTES) == b"".join(frames)
    with pytest.raises(MediaError, match="only data:video/jpeg may have several files with commas between them"):
        await read_data_url(f"data:video/mp4;base64,{text}", MAX_BYTES)
    with pytest.raises(MediaError, match="frame 4 of the data: URL is not a JPEG file"):
        await read_data_url(f"data:video/jpeg;base64,{text},iVBORw0KGgo=", MAX_BYTES)


async def test_reads_quoted_data_url() -> None:
    for text in ("%2B%2F8%3D", "%2b%2f8%3d", "+/8="):
        assert await read_data_url(f"data:;base64,{text}", MAX_BYTES) == b"\xfb\xff"


BAD_URLS = [
    "data:",
    "data:,hi",
    "data:image/png,hi",
    "data:;base64",
    "data:;base64,a",
    "data:;base64,ab c",
    "data:;base64,é===",
    "data:;base64,%41%41%41%41",
    "data:;base64,%252BAA",
]


@pytest.mark.parametrize("url", BAD_URLS)
async def test_refuses_malformed_data_url(url: str) -> None:
    with pytest.raises(MediaError, match="base64"):
        await read_data_url(url, MAX_BYTES)


async def test_refuses_large_data_url() -> None:
    url = "data:;base64," + base64.b64encode(bytes(1001)).decode()
    assert len(await read_data_url(url, 1001)) == 1001
    with pytest.raises(MediaError, match="--max-media-size"):
        await read_data_url(url, 1000)


@given(st.text())
def test_any_data_url_is_read_or_refused(text: str) -> None:
    with pytest.raises(MediaError):
        asyncio.run(read_data_url("data:" + text.replace(",", ""), MAX_BYTES))


async def test_reads_file(folder: Path, threads: concurrent.futures.Executor) -> None:
    (folder / "link.png").symlink_to("in/a b.png")
    (folder / "other").symlink_to(folder / "in")
    for name in ("in/a%20b.png", "in/a b.png", "in/../in/a b.png", "link.png", "other/a%20b.png"):
        assert await read(f"file://{folder}/{name}", threads, folder) == b"picture"
    assert await read(f"file://localhost{folder}/link.png", threads, folder) == b"picture"


async def test_what_surrounds_a_url_is_no_part_of_it(folder: Path, threads: concurrent.futures.Executor) -> None:
    assert await read(" \n\tdata:;base64,+/8= ", threads, folder) == b"\xfb\xff"
    assert await read(f" file://{folder}/in/a b.png\r\n", threads, folder) == b"picture"
    with pytest.raises(MediaError, match="no public address"):
        await read(" http://127.0.0.1/cat.png ", threads, folder)
    with pytest.raises(MediaError, match="no control characters"):
        await read("http://127.0.0.1/\ncat.png", threads, folder)


async def test_refuses_files_without_folder(folder: Path, threads: concurrent.futures.Executor) -> None:
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        await read(f"file://{folder}/in/a%20b.png", threads, "")


async def test_refuses_files_elsewhere(folder: Path, threads: concurrent.futures.Executor) -> None:
    secret = folder.parent / "secret"
    (folder / "out.png").symlink_to(secret)
    (folder / "up").symlink_to("..")
    (folder / "hollow").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    names = [
        "../secret",
        "%2e%2e/secret",
        "out.png",
        "up/secret",
        "hollow",
        "loop",
        "in",
        "",
        "missing",
        "../media-2/x",
    ]
    urls = [f"file://{folder}/{name}" for name in names]
    for url in (*urls, f"file://{secret}", "file:///etc/passwd", "file:///dev/zero", "file:///proc/self/environ"):
        with pytest.raises(MediaError, match="no such file below"):
            await read(url, threads, folder)
    for url in ("file://host/x", "file:x", "file:", "file:///a%00b", "file://[/"):
        with pytest.raises(MediaError, match=r"absolute path|not valid"):
            await read(url, threads, folder)


async def test_refuses_what_is_no_regular_file(folder: Path, threads: concurrent.futures.Executor) -> None:
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        place = os.getcwd()
        os.chdir(folder)  # because a socket's path must be short
        try:
            listener.bind("socket")
        finally:
            os.chdir(place)
        for name in ("pipe", "socket"):
            with pytest.raises(MediaError, match="no such file below"):
                await read(f"file://{folder}/{name}", threads, folder)


async def test_refuses_large_file(folder: Path, threads: concurrent.futures.Executor) -> None:
    (folder / "large").write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(MediaError, match="--max-media-size"):
        await read(f"file://{folder}/large", threads, folder)


async def test_slow_disk_has_a_deadline(folder: Path, threads: concurrent.futures.Executor) -> None:
    go_on = threading.Event()
    threads.submit(go_on.wait)
    try:
        with pytest.raises(UnreachableMediaError, match="could not be read within"):
            await read(f"file://{folder}/in/a b.png", threads, folder, seconds=0.05)
    finally:
        go_on.set()
