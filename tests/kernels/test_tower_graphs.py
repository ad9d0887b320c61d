"""Recordings of an encoder's layers: made when a number of rows comes again, and dropped when there are too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paceline.core.media import MediaKind
from paceline.kernels import select_kernels
from paceline.kernels.encoding import Between
from tests.models.encoder_cases import encode, image, load

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["edge", "gemma3", "qwen3_vl"])
def test_replayed_encoders_give_the_same_bits(encoder_checkpoint: Any, kind: str) -> None:
    folder, _ = encoder_checkpoint(kind)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoders = load(folder, select_kernels(device, "triton-invariant"))
    size = {"edge": (48, 96), "gemma3": (56, 56), "qwen3_vl": (64, 96)}[kind]
    first, second = image(*size), 255 - image(*size)
    expected = [encode(encoders, MediaKind.IMAGE, first)]  # not recorded yet
    found = [encode(encoders, MediaKind.IMAGE, own) for own in (second, first)]
    assert torch.equal(found[1], expected[0])
    assert not torch.equal(found[0], found[1])
