from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack.collector import Collector, collect
from tests.stack.processes import Stack, serve

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collect() as running:
        yield running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Stack]:
    """A stack with one worker of each role and the bundled instruct model, shared by a module."""
    log = tmp_path_factory.mktemp("stack") / "log"
    options = ("--kv-memory=512MiB", "--log-level=info", "--log-format=json")
    with serve(log, MODEL, *options, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}) as running:
        yield running
