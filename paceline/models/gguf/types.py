"""The types of a GGUF file's tensors that workers read where the file lies. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WHOLE_TYPES = ("F32", "F16", "BF16")
"""Types that are not quantized."""

FP16_PLACES: Mapping[str, Sequence[int]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Quantized types, which are those of blocks.py, and the first bytes of the fp16 numbers in a block. If these are
finite, all weights of the block are.
"""
