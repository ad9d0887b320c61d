"""A process that decodes media for the gateway: `python -m paceline.services.gateway.planning.media.decoder FD MEMORY`.

The bytes come from clients, and decoders of media have had many security holes. So the decoders run in this process,
which has nothing but the item to decode: no secrets in its environment, no files, no sockets, and limits on memory and
time (see `confinement.py`). If the process crashes or hangs, only one item is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import resource
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.services.gateway.planning.media import audio_decoder, image_decoder, video_decoder
from paceline.services.gateway.planning.media.channel import Channel, ChannelError
from paceline.services.gateway.planning.media.confinement import confine
from paceline.services.gateway.planning.media.container import BrokenItemError
from paceline.services.gateway.planning.media.items import ImageSize

_LATE_MODULES = ("PIL.ImageColor", "av.subtitles.codeccontext", "av.subtitles.stream")
_DECODERS: dict[str, Callable[..., tuple[dict[str, Any], NDArray[Any]]]] = {
    "image": image_decoder.decode,
    "video": video_decoder.decode,
    "audio": audio_decoder.decode,
}


def main(descriptor: int, memory: int) -> None:
    """Decode items until the gateway closes the socket.

    Args:
        descriptor: of the socket to the gateway.
        memory: largest size of the address space, in bytes.
    """
    channel = Channel(socket.socket(fileno=descriptor))
    _import_the_rest()
    confine(memory)
    # What decoders say about broken files would fill the gateway's log.
    warnings.simplefilter("ignore")
    logging.disable()
    channel.send({"ready": True})
    with contextlib.suppress(ChannelError, ConnectionError):
        while True:
            job, data = channel.receive(memory)
            if job["asks"]:
                job["options"]["fit"] = partial(_ask, channel)
            channel.send(*decode(job, data))


def decode(job: dict[str, Any], data: memoryview) -> tuple[dict[str, Any], bytes | memoryview]:
    """Decode an item. Return the header and the payload of the answer: its facts and its array, or the fault."""
    _limit_cpu(job["seconds"])
    try:
        facts, array = _DECODERS[job["kind"]](data, job["max_bytes"], **job["options"])
    except BrokenItemError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"error": "to decode it takes too much memory; send a smaller one", "retire": True}, b""
    except Exception as error:
        # Decoders raise errors of many types if a file is broken.
        return {"error": f"it cannot be decoded ({type(error).__name__})"}, b""
    header = {"facts": facts, "shape": array.shape, "dtype": array.dtype.str}
    return header, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _ask(channel: Channel, height: int, width: int) -> ImageSize | None:
    """Ask the gateway for the size to which to resize an image. Raises BrokenItemError if it refuses the image."""
    channel.send({"size": [height, width]})
    answer, _ = channel.receive(0)
    if answer["is_refused"]:
        raise BrokenItemError("the gateway does not want it")  # which knows why
    return None if answer["resize"] is None else ImageSize(**answer["resize"])


def _import_the_rest() -> None:
    """Import the modules that Pillow and PyAV would otherwise import when a file needs them."""
    Image.init()
    for name in _LATE_MODULES:
        importlib.import_module(name)


def _limit_cpu(seconds: float) -> None:
    """Have the system kill this process after this many more seconds of CPU time, even if the gateway has ended."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
