"""The scaling of rotary embeddings in GGUF files, as config.json says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import ReaderTensor

from paceline.core.errors import ModelError
from paceline.models.gguf.metadata import Metadata

Parameters = Mapping[str, Any]

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with divisors of the frequencies of Llama 3's rotary embedding, a number for each pair of
dimensions."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3.1 to 3.3, without its factor. Their files have only the quotients that follow from it."""

_KNOWN = (
    *("type", "factor", "attn_factor", "original_context_length", "finetuned", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor", "yarn_log_multiplier"),
)
"""Names of parameters that are converted, or that have one value only, or that do not affect results."""
_LOST = "its rope scaling would be lost"


def rope_scaling(metadata: Metadata, divisors: ReaderTensor | None, theta: float, head_dim: int) -> Parameters:
    """Return the type of a rotary embedding, with its parameters except for its base `theta`.

    Args:
        divisors: the tensor ROPE_FACTORS; None if the file has none.

    Raises:
        DamagedError: a parameter is impossible.
        ModelError: config.json cannot say how the file scales the embedding.
    """
    place = f"{metadata.architecture}.rope"
    factor = metadata.real(f"{place}.scaling.factor", 0, metadata.real(f"{place}.scale_linear", 0, 1.0)) or 1.0
    kind = metadata.get(f"{place}.scaling.type", "linear")
    own = math.prod(metadata.real(f"{place}.scaling.{name}", 0, 1.0) for name in ("attn_factor", "yarn_attn_factor"))
    known = {f"{place}.scaling.{name}" for name in _KNOWN}
    ignored = [name for name in metadata if name.startswith(f"{place}.scaling.") and name not in known]
    if own != 1 and kind != "yarn":
        ignored.append(f"{place}.scaling.attn_factor")
    if ignored:
        raise ModelError(f"{_LOST}: its {ignored[0]} is not converted")
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"} if divisors is None else _llama3(divisors, theta, head_dim)
    if divisors is not None:
        raise ModelError(_LOST)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(metadata, f"{place}.scaling", factor, own)
    raise ModelError(f"{_LOST}: its type is {kind!r:.100}, and only none, linear and yarn are converted")


def scales_rope(metadata: Metadata) -> bool:
    """Return whether a file scales its rotary embedding by a factor. If it names no type, the type is linear."""
    place = f"{metadata.architecture}.rope"
    names = f"{place}.scaling.factor", f"{place}.scale_linear"
    scaled = any(metadata.get(name, 1.0) not in (0.0, 1.0) for name in names)
    return bool(metadata.get(f"{place}.scaling.type", "linear" if scaled else "none") != "none")


def _yarn(metadata: Metadata, place: str, factor: float, own: float) -> Parameters:
    """Return the parameters of YaRN.

    Args:
        own: number by which the usual factor of queries and keys is multiplied.
    """
    for name, usual in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if metadata.get(f"{place}.{name}", usual) not in (usual, -1.0):
            raise ModelError(f"{_LOST}: its {place}.{name} is not {usual:g}")
    context = metadata.whole(f"{metadata.architecture}.context_length")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.whole(f"{place}.original_context_length", default=context),
    }
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f"{place}.{theirs}" in metadata:
            found[ours] = metadata.real(f"{place}.{theirs}", 0)
    if own != 1:
        found["attention_factor"] = own * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return found


def _llama3(tensor: ReaderTensor, theta: float, head_dim: int) -> Parameters:
    divisors = np.asarray(tensor.data)
    factor = float(divisors.max(initial=0.0)) if divisors.dtype == np.float32 else 0.0
    if 1.0 <= factor < math.inf:
        low, high, original = _LLAMA3_ROPE.values()
        # The share of the unscaled frequency depends on the number of rotations within the original context.
        rotations = original / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
        share = np.clip((rotations - low) / (high - low), 0, 1)
        expected = 1 / (share + (1 - share) / factor)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
    raise ModelError(_LOST)
