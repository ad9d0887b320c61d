"""Fixtures for the kvtransfer tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.kvtransfer.kv_host import Host


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    one = Host(tmp_path)
    await one.start()
    yield one
    await one.close()
