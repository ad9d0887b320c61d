"""The memory that the weights of a model take, by their format. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from paceline.core.config import WeightForm
from paceline.core.online_quantization import OnlineQuantization, rounded_bytes
from paceline.models.config import read_format
from paceline.models.files.gguf_reference import gguf_files, has_reference, read_reference
from paceline.models.folder import count_weights, stored_tensors
from paceline.models.formats.base import FLOAT8, FLOATS, PACKED

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ZEROS = (".qzeros", ".weight_zero_point")
"""Ends of the names of tensors with the zeros of quantized matrices."""


def weight_sizes(folder: Path, form: WeightForm, dtype: str) -> Mapping[str, int]:
    """Return the bytes of a model's weights in memory by format, as the headers of its files say. No weights are read.

    Kernels that compress bf16 weights need three quarters of the bytes of "bfloat16".

    Args:
        form: the form of the matrices in memory.
        dtype: the model's dtype, such as "bfloat16", which is also the name of the format of all other weights.

    Raises:
        ModelError: a file or the index is missing or damaged.
    """
    stored = read_format(folder)
    whole = {dtype: count_weights(folder, stored) * _ITEMSIZES[dtype]}
    if form == "none":
        return whole
    if form == "gguf":
        files = gguf_files(folder)
        return {"gguf": sum(file.stat().st_size for file in files)} if files else whole
    online = form if isinstance(form, OnlineQuantization) else None
    tensors = stored_tensors(folder)
    if has_reference(folder):
        tensors += [(name, "BF16", [*matrix.shape]) for name, matrix in read_reference(folder).matrices.items()]
    has_offsets = any(name.endswith(_ZEROS) for name, _, _ in tensors)
    sizes: Counter[str] = Counter()
    for name, kind, shape in tensors:
        held = 1 if stored is None else stored.weights_in(name, kind, shape)
        count = math.prod(shape) * held
        if not count:
            continue
        rounded = online.format_of(name) if online is not None and len(shape) > 1 else None
        if stored is not None and (held > 1 or kind not in FLOATS):
            sizes[stored.name.lower()] += int(count * _stored_bits(kind, held, has_offsets) / 8)
        elif rounded is None:
            sizes[dtype] += count * _ITEMSIZES[dtype]
        else:
            sizes[rounded] += rounded_bytes(count, rounded)
    return dict(sizes.most_common())


def _stored_bits(kind: str, held: int, has_offsets: bool) -> float:
    """Return the bits that a weight of a quantized matrix takes in memory, with its share of the scales.

    Args:
        kind: the dtype of the tensor that holds the weights.
        held: the number of weights in each of the tensor's elements.
        has_offsets: whether the matrices have zeros, and so offsets of 32 bits beside scales of 32 bits.
    """
    if kind in FLOAT8:
        return 8.25
    if kind not in PACKED and held > 1:
        return 4.5  # floats, and numbers of a table
    return (32 if kind in PACKED else 8) / held + (2 if has_offsets else 1)
