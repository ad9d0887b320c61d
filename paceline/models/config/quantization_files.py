"""Files beside config.json that describe quantized weights. AutoGPTQ, AutoAWQ and ModelOpt wrote them before there was
a place for it in config.json, and some still do. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import ModelError
from paceline.core.model_folder import QUANTIZATION_FILES, read_object
from paceline.models.config.fields import Json

_DECISIVE = ("quant_method", "quant_algo", "bits", "group_size", "sym", "checkpoint_format", "version")
"""Fields on which the reading of tensors depends. Other fields say how the weights were made."""
_OF_AWQ = {"w_bit": "bits", "q_group_size": "group_size"}
"""Names of fields that only AutoAWQ's own file has, and their names in config.json."""


def with_quantization(raw: Json, folder: Path) -> Json:
    """Return a model's config, with the `quantization_config` of a file beside config.json if config.json has none.

    Args:
        raw: the content of the folder's config.json.

    Raises:
        ModelError: a file cannot be read, or two files of the folder contradict each other.
    """
    found = {"config.json": _of_config(raw)}
    for name in QUANTIZATION_FILES:
        if content := read_object(folder / name):
            found[name] = _of_file(folder / name, content)
    _refuse_contradictions(folder, found)
    if found["config.json"] or len(found) == 1:
        return raw
    merged: dict[str, object] = {}
    for stated in found.values():
        merged = {**stated, **merged}
    # Files of AutoGPTQ name no method.
    return {**raw, "quantization_config": {"quant_method": "gptq", **merged}}


def _of_config(raw: Json) -> Json:
    nested = raw.get("text_config")
    for fields in (raw, nested if isinstance(nested, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if stated := fields.get(name):
                return stated if isinstance(stated, Mapping) else {"quant_method": stated}
    return {}


def _of_file(path: Path, content: Json) -> Json:
    """Return the content of one of QUANTIZATION_FILES with the names that config.json has for its fields."""
    if path.name == "hf_quant_config.json":
        quantization = content.get("quantization")
        if not isinstance(quantization, Mapping):
            raise ModelError(f"{path} must have an object named quantization, as ModelOpt writes it")
        return {"quant_method": "modelopt", **quantization}
    if "w_bit" in content:
        return {"quant_method": "awq", **{_OF_AWQ.get(name, name): value for name, value in content.items()}}
    if "bits" not in content and "quant_method" not in content:
        raise ModelError(f"{path} names neither bits nor quant_method, so the weights cannot be read; add them")
    return content


def _refuse_contradictions(folder: Path, found: Mapping[str, Json]) -> None:
    first: dict[str, tuple[str, object]] = {}
    for name, stated in found.items():
        for field in _DECISIVE:
            if stated.get(field) is None:
                continue
            before, value = first.setdefault(field, (name, stated[field]))
            if str(value).lower() != str(stated[field]).lower():
                raise ModelError(
                    f"{folder}: {field} is {value!r:.40} in {before} and {stated[field]!r:.40} in {name}; remove the "
                    "file that does not describe the weights"
                )
