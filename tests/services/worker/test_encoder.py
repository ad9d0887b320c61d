"""The encoder of a worker: whether it goes on with its work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch

from paceline.core.errors import ModelError
from paceline.core.media import MediaKind
from paceline.engine.compute_thread import EncodeJob
from paceline.kernels.encoding import Between
from paceline.models.encoders.base import Encoders
from paceline.services.worker import encoder
from paceline.services.worker.encoder import WorkerEncoder
from tests.services.gateway.conftest import eventually
from tests.services.worker.media_calls import image

ROWS = 3


class Tower:
    """An encoder with two pieces of work."""

    takes = torch.uint8

    def rows(self, shape: Sequence[int]) -> int:
        return ROWS

    def encode(self, x: torch.Tensor, between: Between) -> torch.Tensor:
        between()
        between()
        return torch.zeros(ROWS, 1)


async def test_loading_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "STILL_SECONDS", -1.0)
    may_end = threading.Event()

    def load() -> Encoders:
        may_end.wait()
        raise ModelError("damaged")

    own = WorkerEncoder(load, lambda job: None)
    task = asyncio.create_task(own.compute("r", image(ROWS, 0), lambda rows: None, asyncio.Event()))
    await asyncio.sleep(0)
    assert own._turns.is_taken
    assert not own.stands_still
    may_end.set()
    with pytest.raises(ModelError):
        await task


async def test_work_that_gets_no_thread_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "STILL_SECONDS", -1.0)
    towers = Encoders({MediaKind.IMAGE: Tower()}, 1, torch.float32, torch.device("cpu"))
    launched, moved = list[EncodeJob](), list[float]()
    own = WorkerEncoder(lambda: towers, launched.append)
    assert not own.stands_still
    work = [own.compute("r", image(ROWS, seed), lambda rows: None, asyncio.Event()) for seed in range(2)]
    tasks = [asyncio.create_task(each) for each in work]
    for number in range(2):
        await eventually(lambda: len(launched) == number + 1)  # noqa: B023
        assert own.stands_still
        launched[number].run(lambda: moved.append(own._moved))
        launched[number].on_end(None)
    await asyncio.gather(*tasks)
    assert not own.stands_still
    assert moved == sorted(set(moved))  # each piece is a move
