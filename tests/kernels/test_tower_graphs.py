"""Recordings of an encoder's layers: made when a number of rows comes again, and dropped when there are too many."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from paceline.kernels.encoding import Between

pytest.importorskip("triton", reason="the package triton is not installed")

from paceline.kernels.triton_kernels import tower_graphs
from paceline.kernels.triton_kernels.graphs import CalledAgain
from paceline.kernels.triton_kernels.tower_graphs import TowerGraphs


class Recorder:
    """Makes recordings, and counts them."""

    def __init__(self) -> None:
        self.made = 0
        self.recorded = 0

    def __call__(self) -> Callable[[Callable[[], list[Tensor]]], CalledAgain]:
        self.made += 1
        return self._record

    def _record(self, run: Callable[[], list[Tensor]]) -> CalledAgain:
        self.recorded += 1
        return CalledAgain(run)


def tower(x: Tensor, y: Tensor, between: Between) -> tuple[Tensor, Tensor]:
    between()
    between()
    return x + y, (x * y).sum(0, keepdim=True)


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 4)


def test_what_comes_again_is_recorded_and_replayed() -> None:
    recorder, between = Recorder(), mock.Mock()
    graphs = TowerGraphs(tower, recorder)
    kept = []
    for turn, rows in enumerate((3, 3, 5, 3, 5)):
        given = inputs(rows)
        found = graphs(*given, between=between)
        kept.append((found, tower(*given, between=between)))
        assert recorder.recorded == (0, 1, 1, 1, 2)[turn]
    for found, expected in kept:  # later replays have not changed them
        assert all(map(torch.equal, found, expected))


def test_a_recording_is_one_piece() -> None:
    graphs = TowerGraphs(tower, Recorder())
    calls = []
    for _ in range(3):
        between = mock.Mock()
        graphs(*inputs(3), between=between)
        calls.append(between.call_count)
    assert calls == [2, 1, 1]


def test_few_recordings_are_kept_and_none_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_graphs, "MAX_ROWS", 4)
    monkeypatch.setattr(tower_graphs, "MAX_GRAPHS", 2)
    graphs = TowerGraphs(tower, recorder := Recorder())
    for rows in (1, 1, 2, 2, 5, 5, 3, 1, 1):
        graphs(*inputs(rows), between=lambda: None)
    assert (recorder.made, recorder.recorded) == (2, 3)


def test_recordings_of_many_rows_together_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_graphs, "MAX_KEPT_ROWS", 6)
    graphs = TowerGraphs(tower, recorder := Recorder())
    made = []
    for rows in (2, 2, 4, 4, 1, 1, 2, 2):
        graphs(*inputs(rows), between=lambda: None)
        made.append((recorder.made, recorder.recorded))
    assert made == [(1, 0), (1, 1), (1, 1), (1, 2), (1, 2), (2, 3), (2, 3), (2, 4)]
