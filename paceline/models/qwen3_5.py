"""The text models of Qwen 3.5 that read images: Qwen 3.5 whose positions have three dimensions."""

from __future__ import annotations

from paceline.models.qwen3_next import Qwen3Next
from paceline.models.qwen3_vl import ReadsGrids


class Qwen35WithMedia(ReadsGrids, Qwen3Next):
    """Qwen3_5ForConditionalGeneration, with or without experts, without its encoder."""
