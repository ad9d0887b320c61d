"""A real process that has confined itself: it decodes, and it can do nothing else."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.services.gateway.planning.media.pool import DecodeProcess
from tests.services.gateway.planning.media.samples import IMAGE_FORMATS, audio_file, image_file, picture, video_file

CHILD = """
import os, signal, socket, sys
from paceline.services.gateway.planning.media.confinement import confine

file, address = sys.argv[1:]
attempts = {
    "open": lambda: open(file).close(),
    "write": lambda: open(file, "a").close(),
    "list": lambda: os.listdir(os.path.dirname(file)),
    "connect": lambda: socket.socket(socket.AF_UNIX).connect(address),
    "remove": lambda: os.unlink(file),
    "rename": lambda: os.rename(file, file + "2"),
    "make a folder": lambda: os.mkdir(file + "3"),
    "run": lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}),
    "signal": lambda: os.kill(os.getppid(), 0),
}
confine(4 << 30)
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
"""


def landlock_version() -> int:
    if sys.platform != "linux":
        return 0
    return int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))


def test_a_confined_process_reaches_no_file_no_socket_and_no_process(tmp_path: Path) -> None:
    file, address = tmp_path / "file", str(tmp_path / "socket")
    file.write_text("text")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        child = subprocess.run([sys.executable, "-c", CHILD, str(file), address], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    possible = set(child.stdout.splitlines())
    if landlock_version() < 6:  # signals
        possible -= {"signal"}
    if landlock_version() < 1:
        possible -= {"remove", "rename", "make a folder", "run"}
    assert possible == set()


@pytest.fixture(scope="module")
def decoder() -> Iterator[DecodeProcess]:
    process = DecodeProcess(2 << 30)
    yield process
    process.end()


def exif_picture() -> bytes:
    image = picture()
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    return image_file("JPEG", image, exif=exif)


IMAGE: dict[str, Any] = {"max_pixels": 1 << 20}
VIDEO: dict[str, Any] = {**IMAGE, "max_seconds": 60.0, "sampling": {"most": 4}}
TO_END: dict[str, Any] = {**VIDEO, "sampling": {"most": 4, "per_second": 2.0, "to_end": True}}
AUDIO: dict[str, Any] = {"max_seconds": 10.0, "sample_rate": 16_000}
FILES = {
    **{format: ("image", IMAGE, image_file(format), (4, 6, 3)) for format in IMAGE_FORMATS},
    "turned": ("image", IMAGE, exif_picture(), (6, 4, 3)),
    "palette": ("image", IMAGE, image_file("PNG", picture().convert("P")), (4, 6, 3)),
    "transparent": ("image", IMAGE, image_file("PNG", picture().convert("RGBA")), (4, 6, 3)),
    "16 bits": ("image", IMAGE, image_file("PNG", picture().convert("L").convert("I;16")), (4, 6, 3)),
    "animation": ("image", IMAGE, image_file("GIF", save_all=True, append_images=[picture()]), (4, 6, 3)),
    "animated WebP": ("image", IMAGE, image_file("WEBP", save_all=True, append_images=[picture()]), (4, 6, 3)),
    "mkv": ("video", VIDEO, video_file(format="matroska"), (4, 16, 32, 3)),
    "mp4": ("video", VIDEO, video_file(), (4, 16, 32, 3)),
    "to its end": ("video", TO_END, video_file(), (4, 16, 32, 3)),
    "wav": ("audio", AUDIO, audio_file(), (8_000,)),
    "mp3": ("audio", AUDIO, audio_file(format="mp3", codec="mp3"), None),
}


@pytest.mark.parametrize("name", FILES)
def test_a_confined_process_decodes(decoder: DecodeProcess, name: str) -> None:
    kind, options, data, shape = FILES[name]
    job = {"kind": kind, "options": options, "max_bytes": 1 << 24, "seconds": 20.0}
    _, array = decoder.decode(job, data, 60.0)
    assert shape is None or array.shape == shape
