from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.kernels import select_kernels


def test_auto_finds_a_backend_for_the_cpu() -> None:
    kernels = select_kernels(torch.device("cpu"))
    assert kernels.linear(torch.ones(1, 2), kernels.pack(torch.ones(3, 2))).tolist() == [[2.0, 2.0, 2.0]]


def test_a_backend_is_chosen_by_name() -> None:
    assert select_kernels(torch.device("cpu"), "reference").name == "reference"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'cudnn'; known are: auto, reference, native"):
        select_kernels(torch.device("cpu"), "cudnn")
