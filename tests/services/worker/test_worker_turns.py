"""The turns that a worker takes, from its options."""

from __future__ import annotations

import os

import pytest
import torch

from paceline.core.config import WorkerConfig
from paceline.core.turns import PAGE_BYTES, DecodeTurns
from paceline.services.worker.worker_setup import turns_of


@pytest.mark.parametrize(("options", "left"), [({}, 60), ({"itl_target_ms": 10}, 20), ({"itl_target_ms": 90}, 50)])
def test_without_an_itl_target_prefill_gets_more_of_a_slow_machine(
    options: dict[str, float], left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", torch.get_num_threads)
    page = memoryview(bytearray(PAGE_BYTES))
    turns = turns_of(WorkerConfig(model="any", **options), torch.device("cpu"), page, 0)
    assert turns is not None
    turns.take_role(decodes=True)
    assert isinstance(turns.present, DecodeTurns)
    now = 10**12
    turns.present._clock = lambda: now
    turns.begin()
    now += 40_000_000  # a step of 40 ms
    page.cast("q")[66] = now  # prefill begins to wait
    page.cast("q")[1] = now + 1_000_000
    turns.end(hands_over=False)
    assert page.cast("q")[0] - now == left * 1_000_000
