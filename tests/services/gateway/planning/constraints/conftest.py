"""Fixtures of the tests of constraints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.gateway.planning.constraints.desk import Desk
from tests.services.gateway.toy_model import write_toy_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture
async def desk(folder: Path) -> AsyncIterator[Desk]:
    desk = Desk(folder)
    await desk.compiler.start()
    yield desk
    await desk.compiler.close()
