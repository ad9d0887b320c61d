"""Stacks that several test modules share. Each starts once in a run of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers

from tests.services.pool.tiny_bert import write_tiny_bert
from tests.stack.collector import Collector, collect
from tests.stack.processes import Stack, serve
from tests.stack.stacks import STACKS, Way, way_of


@pytest.hookimpl(trylast=True)  # after pytest has ordered the tests by their fixtures
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run stacks first, and tests that share a stack one after another, so that each stack starts once."""
    order = list(STACKS)

    def place(item: pytest.Item) -> tuple[bool, int]:
        name = way_of(item.nodeid)
        return item.get_closest_marker("stack") is None, order.index(name) if name else -1

    items.sort(key=place)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collect() as running:
        yield running


@pytest.fixture(scope="session")
def way(request: pytest.FixtureRequest) -> Way:
    """The model and options of the shared stack that the mark `on` names."""
    return STACKS[request.param]


@pytest.fixture(scope="session")
def stack(
    way: Way, tmp_path_factory: pytest.TempPathFactory, collector: Collector, real_model: Callable[[str], Path]
) -> Iterator[Stack]:
    """The shared stack that the mark `on` names."""
    folder = tmp_path_factory.mktemp("stack")
    options = way.options(real_model(way.model), folder)
    with serve(
        folder / "log", way.model, *options, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    ) as running:
        yield running


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.BertModel]:
    """The folder of a tiny encoder, and its reference."""
    folder = tmp_path_factory.mktemp("encoder")
    return folder, write_tiny_bert(folder)


@pytest.fixture(scope="session")
def encoder_stack(
    encoder: tuple[Path, transformers.BertModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack of the tiny encoder with two workers, whose steps are of few tokens, so that each request takes many."""
    options = ("--pool=2", "--threads=1", "--max-batched-tokens=64", "--max-seqs=32")
    with serve(tmp_path_factory.mktemp("pool") / "log", str(encoder[0]), *options, fleets=0) as running:
        yield running
