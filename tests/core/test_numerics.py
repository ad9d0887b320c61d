from __future__ import annotations

import pytest

from paceline.core.numerics import Numerics, may_differ

AVX2 = Numerics("avx2", "bfloat16", "none")


@pytest.mark.parametrize(
    ("numerics", "text"),
    [(AVX2, "avx2 bfloat16"), (Numerics("triton sm_90", "float32", "int8"), "triton sm_90 float32 int8")],
)
def test_the_text_names_what_was_rounded(numerics: Numerics, text: str) -> None:
    assert str(numerics) == text


@pytest.mark.parametrize(
    ("before", "now", "differ"),
    [
        (AVX2, Numerics("avx2", "bfloat16", "none"), False),
        (AVX2, Numerics("portable", "bfloat16", "none"), True),
        (AVX2, Numerics("avx2", "float32", "none"), True),
        (AVX2, Numerics("avx2", "bfloat16", "int8"), True),
        (AVX2, None, True),
        (None, AVX2, False),
        (None, None, False),
    ],
)
def test_tokens_may_differ_unless_the_numerics_are_known_to_be_equal(
    before: Numerics | None, now: Numerics | None, differ: bool
) -> None:
    assert may_differ(before, now) is differ
