"""Rotary embeddings with three positions (M-RoPE), which models have for images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.fields import Fields, NotNativeError
from paceline.models.model_config import ModelConfig


def with_grids(config: ModelConfig, text: Fields, default: Sequence[int]) -> ModelConfig:
    """Return the config of a text model whose full attention turns queries and keys by three positions.

    Args:
        text: the fields of the text model.
        default: numbers of pairs of dimensions for frames, rows and columns, if the fields have none.

    Raises ModelError, or NotNativeError if the sections lie side by side.
    """
    parameters, full = text.rope_parameters(), config.attention["full"]
    assert full.rope is not None
    if not parameters.get("mrope_interleaved", True):
        raise NotNativeError("a rotary embedding with sections side by side (mrope_interleaved false) is not supported")
    sections = [int(pairs) for pairs in parameters.get("mrope_section") or default]
    turned = (full.rope.rotated_dims or full.head_dim) // 2
    if len(sections) != 3 or sum(sections) != turned or min(sections) < 0:
        raise ModelError(
            f"mrope_section must be three numbers whose sum is {turned}, the pairs of dimensions that turn, not "
            f"{sections}"
        )
    frames, rows, columns = sections
    return replace(config, attention={"full": replace(full, rope=replace(full.rope, sections=(frames, rows, columns)))})
