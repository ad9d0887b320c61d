"""The numbers in the text of a simulation."""

from __future__ import annotations

import pytest

from paceline.simulator.text import three_digits


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (9.876, "9.88"), (999.4, "999"), (1834.2, "1834"), (86400.0, "86400")],
)
def test_large_numbers_have_no_exponent(number: float, text: str) -> None:
    assert three_digits(number) == text
