"""Finds the processor of a model by the model's family. A new family needs an entry in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.model_folder import read_object
from paceline.services.gateway.planning.media.processors.base import Processor
from paceline.services.gateway.planning.media.processors.col import read_colpali, read_colqwen2
from paceline.services.gateway.planning.media.processors.gemma3 import read_gemma3
from paceline.services.gateway.planning.media.processors.gemma4 import read_gemma4
from paceline.services.gateway.planning.media.processors.llava import read_llava
from paceline.services.gateway.planning.media.processors.qwen3_vl import read_qwen3_5, read_qwen3_vl

Json = Mapping[str, Any]

FAMILIES: dict[str, Callable[[Json, Json], Processor | None]] = {
    "ColPaliForRetrieval": read_colpali,
    "ColQwen2ForRetrieval": read_colqwen2,
    "ColQwen3_5": read_qwen3_5,
    "Gemma3ForConditionalGeneration": read_gemma3,
    "Gemma4ForConditionalGeneration": read_gemma4,
    "Gemma4UnifiedForConditionalGeneration": read_gemma4,
    "LlavaForConditionalGeneration": read_llava,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5,
    "Qwen3VLForConditionalGeneration": read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": read_qwen3_vl,
}
"""For each architecture, the function that reads a processor from the model's config and its processor's settings."""


def read_processor(folder: Path) -> Processor | None:
    """Return the processor of the model in a folder; None if the model takes text alone.

    Raises:
        ModelError: a file of the folder cannot be read.
    """
    config = read_object(folder / "config.json")
    read = FAMILIES.get(next(iter(config.get("architectures") or ()), ""))
    if read is None:
        return None
    settings = read_object(folder / "preprocessor_config.json")
    if videos := read_object(folder / "video_preprocessor_config.json"):
        settings["video_processor"] = videos
    return read(config, settings | read_object(folder / "processor_config.json"))
