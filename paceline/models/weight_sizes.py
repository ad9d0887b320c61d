"""The memory that the weights of a model take, by their format. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from paceline.core.config import WeightForm
from paceline.core.online_quantization import OnlineQuantization, rounded_bytes
from paceline.models.config import read_format
from paceline.models.folder import count_weights, stored_tensors
from paceline.models.gguf_reference import gguf_files, has_reference, read_reference

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


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
    if stored is not None:
        return {stored.name.lower(): count_weights(folder, stored) // 32 * 34}
    assert isinstance(form, OnlineQuantization)
    sizes: Counter[str] = Counter()
    shapes = {name: tuple(shape) for name, _, shape in stored_tensors(folder)}
    if has_reference(folder):
        shapes |= {name: tuple(matrix.shape) for name, matrix in read_reference(folder).matrices.items()}
    for name, shape in shapes.items():
        rounded = form.format_of(name) if len(shape) > 1 else None
        if rounded is None:
            sizes[dtype] += math.prod(shape) * _ITEMSIZES[dtype]
        else:
            sizes[rounded] += rounded_bytes(math.prod(shape), rounded)
    return dict(sizes.most_common())
