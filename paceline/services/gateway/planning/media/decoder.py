"""A process that decodes media for the gateway: `python -m paceline.services.gateway.planning.media.decoder FD MEMORY`.

The bytes come from clients, and decoders of media have had many security holes. So the decoders run in this process,
which has nothing but the item to decode: no secrets in its environment, no files, no sockets, and limits on memory and
time (see `confine`). If the process crashes or hangs, only one item is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
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
from paceline.services.gateway.planning.media.container import BrokenItemError
from paceline.services.gateway.planning.media.items import ImageSize

_NICENESS = 10
"""Niceness of a process that decodes. A worker that wants the same core gets nine times its CPU time, because other
requests wait for the worker. With much less CPU time, a busy host would never decode an image in time."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
"""Numbers of Landlock's system calls, which are the same on all architectures of Linux."""
_LANDLOCK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights on files, each one bit, by the first version of Landlock that knows so many."""
_TCP_RIGHTS, _SCOPES = 0b11, 0b11
"""Bits of Landlock's TCP rights (bind, connect; from version 4 on) and of its scopes (abstract Unix sockets, signals;
from version 6 on)."""


def confine(memory: int) -> None:
    """Restrict this process permanently. Restrictions that the system does not have or allow are left out.

    All modules must have been imported, because no file can be opened afterwards.

    Args:
        memory: largest size of the address space, in bytes.
    """
    os.nice(_NICENESS)
    if sys.platform == "linux":
        # An item that arrives does not interrupt a thread of a worker at once, which its whole team would wait for.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        leave_network()
        _forbid_files()
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays open; no further file and no socket can be opened
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (limit, limit))


def leave_network() -> bool:
    """Move this process to an empty network of its own. Return whether the system allows this.

    Some containers forbid the move, although `/proc/sys/user/max_user_namespaces` is not 0. The other limits remain.
    """
    return bool(ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0)


def _forbid_files() -> None:
    """Forbid, by Landlock, opening, running, renaming and removing files, TCP, and signals to other processes.

    See https://docs.kernel.org/userspace-api/landlock.html.
    """
    libc = ctypes.CDLL(None)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return
    files = _FILE_RIGHTS[max(known for known in _FILE_RIGHTS if known <= version)]
    handled = [(1 << files) - 1, *[_TCP_RIGHTS] * (version >= 4), *[_SCOPES] * (version >= 6)]
    # A right that the set handles is forbidden, because the set has no rules that allow it.
    rights = (ctypes.c_uint64 * len(handled))(*handled)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rights, ctypes.c_size_t(ctypes.sizeof(rights)), 0)
    if ruleset < 0:
        return
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *(ctypes.c_ulong(each) for each in (1, 0, 0, 0)))
    libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


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
