from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from paceline.services.gateway.planning.media.pool import DecodeProcess

Decode: TypeAlias = Callable[..., tuple[dict[str, Any], Any]]
MAX_BYTES = 8 << 20


@pytest.fixture(scope="session")
def process() -> Iterator[DecodeProcess]:
    """A process that decodes."""
    process = DecodeProcess(2 << 30)
    yield process
    process.end()


@pytest.fixture(scope="session")
def decode(process: DecodeProcess) -> Decode:
    """Decode an item in the process: call it with the kind, the data and the decoder's options."""

    def run(kind: str, data: bytes, **options: Any) -> tuple[dict[str, Any], Any]:
        job = {"kind": kind, "options": options, "max_bytes": MAX_BYTES, "seconds": 60.0}
        return process.decode(job, data, 60.0)

    return run
