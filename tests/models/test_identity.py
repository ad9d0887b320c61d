"""Two models have the same identity only if their weights are the same, although not all bytes are read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from paceline.models.identity import model_identity

HEADER = b"names, shapes and offsets".ljust(8192)


def identity(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(HEADER + weights)
    return model_identity(folder, "bfloat16")


def test_other_weights_of_the_same_shapes_are_another_model(tmp_path: Path) -> None:
    first, second = (random.Random(seed).randbytes(4 << 20) for seed in (1, 2))
    one = identity(tmp_path / "one", first)
    assert identity(tmp_path / "copy", first) == one
    assert identity(tmp_path / "other", second) != one


@pytest.mark.parametrize("place", [0, 300_000, -1])
def test_each_byte_of_a_small_file_counts(tmp_path: Path, place: int) -> None:
    weights = bytearray(600_000)
    one = identity(tmp_path / "one", weights)
    weights[place] = 1
    assert identity(tmp_path / "other", weights) != one
