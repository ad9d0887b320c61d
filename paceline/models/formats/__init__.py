"""Formats of quantized weights in safetensors. A format is one file: how it is recognised, which tensors a matrix has,
what they mean, and what is refused. Imports no torch.

`find_format` returns the format of a checkpoint from its config.json. `Checkpoint` then reads each matrix as the format
says. To add a format, write its file and name it in `_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.core.errors import ModelError
from paceline.models.formats.awq import Awq
from paceline.models.formats.base import ANY, Codes, Json, StoredTensor, WeightFormat
from paceline.models.formats.bitsandbytes import BitsAndBytes
from paceline.models.formats.compressed_tensors import CompressedTensors
from paceline.models.formats.fp8 import Float8
from paceline.models.formats.gptq import Gptq
from paceline.models.formats.modelopt import ModelOpt
from paceline.models.formats.mx import MxFp4

__all__ = ["ANY", "Codes", "StoredTensor", "WeightFormat", "find_format"]

_FORMATS: Mapping[str, Callable[[Json], WeightFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Float8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": MxFp4,
}
"""The formats, by `quant_method`."""


def find_format(config: Json) -> WeightFormat | None:
    """Return the format of a checkpoint's quantized matrices; None if it has none.

    Args:
        config: config.json, or the part of it for the text model.

    Raises:
        ModelError: the format is unknown, or has a variant that is not supported.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise ModelError(f"quantization_config must be an object, not {quantization!r:.80}")
    method = str(quantization.get("quant_method", "")).lower()
    method = {"compressed_tensors": "compressed-tensors"}.get(method, method)
    if method == "auto-round":
        method = _layout_of_auto_round(quantization)
    if method not in _FORMATS:
        raise ModelError(
            f"the checkpoint's weights are quantized by {method or 'an unnamed method'}; supported are "
            f"{', '.join(sorted(_FORMATS))}, and GGUF files; or use the checkpoint in bf16, which --quantization rounds"
        )
    return _FORMATS[method](quantization)


def _layout_of_auto_round(quantization: Json) -> str:
    """Return the layout in which AutoRound wrote a checkpoint."""
    layout = str(quantization.get("packing_format", "")).rsplit(":", 1)[-1]
    return {"auto_gptq": "gptq", "auto_awq": "awq"}.get(layout, f"auto-round in the layout {layout!r}")
