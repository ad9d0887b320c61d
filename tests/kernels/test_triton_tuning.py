from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton

from paceline.kernels.triton_kernels import rowwise
from paceline.kernels.triton_kernels.tuning import Options, Tuner, Untuned

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHOICES = [{"BLOCK": 1}, {"BLOCK": 2}, {"BLOCK": 3}]


class Clock:
    """A clock for launches with known times, by block size."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._seconds = seconds
        self.launched: list[int] = []

    def launch(self, options: Options) -> None:
        self.launched.append(options["BLOCK"])
        if self._seconds[options["BLOCK"]] < 0:
            raise triton.runtime.errors.OutOfResources(3, 2, "shared memory")

    def measure(self, run: Callable[[], None]) -> float:
        run()
        return self._seconds[self.launched[-1]]


def test_the_fastest_choice_is_found_once_and_kept(tmp_path: Path) -> None:
    file, clock = tmp_path / "new" / "gpu.json", Clock({1: 3.0, 2: 1.0, 3: 2.0})
    tuner = Tuner(file, clock.measure)
    for _ in range(2):
        assert tuner.best("gated", "64", CHOICES, clock.launch) == {"BLOCK": 2}
    assert clock.launched == [1, 2, 3]
    later = Clock({1: 1.0, 2: 2.0, 3: 3.0})
    again = Tuner(file, later.measure)
    assert again.best("gated", "64", CHOICES, later.launch) == {"BLOCK": 2}
    assert later.launched == []
    assert again.best("gated", "128", CHOICES, later.launch) == {"BLOCK": 1}
    assert again.best("gated", "64", CHOICES[2:], later.launch) == {
        "BLOCK": 3
    }  # the earlier result is not among the choices any more
    assert [path.name for path in file.parent.iterdir()] == ["gpu.json"]


def test_what_does_not_fit_on_the_gpu_is_no_choice(tmp_path: Path) -> None:
    clock = Clock({1: -1.0, 2: 5.0, 3: -1.0})
    assert Tuner(tmp_path / "gpu.json", clock.measure).best("gated", "64", CHOICES, clock.launch) == {"BLOCK": 2}


def test_what_others_found_meanwhile_stays(tmp_path: Path) -> None:
    clock = Clock({1: 1.0, 2: 2.0, 3: 3.0})
    first, second = (Tuner(tmp_path / "gpu.json", clock.measure) for _ in range(2))
    first.best("gated", "64", CHOICES, clock.launch)
    second.best("gated", "128", CHOICES, clock.launch)
    clock.launched.clear()
    third = Tuner(tmp_path / "gpu.json", clock.measure)
    third.best("gated", "64", CHOICES, clock.launch)
    third.best("gated", "128", CHOICES, clock.launch)
    assert clock.launched == []


@pytest.mark.parametrize("content", ["", "no JSON", "[1, 2]", '{"gated 64": "BLOCK"}'])
def test_a_damaged_file_says_nothing(tmp_path: Path, content: str) -> None:
    file, clock = tmp_path / "gpu.json", Clock({1: 2.0, 2: 1.0, 3: 3.0})
    file.write_text(content)
    assert Tuner(file, clock.measure).best("gated", "64", CHOICES, clock.launch) == {"BLOCK": 2}
    assert Tuner(file, clock.measure).best("gated", "64", CHOICES, clock.launch) == {"BLOCK": 2}
    assert clock.launched == [1, 2, 3]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    clock = Clock({1: 2.0, 2: 1.0, 3: 3.0})
    tuner = Tuner(tmp_path / "file" / "gpu.json", clock.measure)
    assert tuner.best("gated", "64", CHOICES, clock.launch) == {"BLOCK": 2}
    assert "cannot be kept in" in caplog.text


class Countdown:
    """A clock by which the launch with this index is the fastest."""

    def __init__(self, place: int) -> None:
        self._left = place + 1

    def measure(self, run: Callable[[], None]) -> float:
        run()
        self._left -= 1
        return 1.0 if self._left else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("gelu", [False, True])
def test_bits_do_not_depend_on_the_choice(gelu: bool) -> None:
    gate, up = (torch.randn(7, 1100).bfloat16().to(DEVICE) for _ in range(2))
    results = []
    for place in range(len(rowwise.GATED_CHOICES)):
        tuner = Tuner(None, Countdown(place).measure)
        results.append(rowwise.gated(gate, up, gelu, tuner))
        assert (
            tuner.best("gated", f"8192 {gate.dtype} {'gelu' if gelu else 'silu'}", rowwise.GATED_CHOICES, print)
            == (rowwise.GATED_CHOICES[place])
        )
    assert len(results) > 2
    assert all(torch.equal(own, rowwise.gated(gate, up, gelu, Untuned())) for own in results)
