"""The preprocessing of ColPali and ColQwen2 against that of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from paceline.core.errors import ModelError
from paceline.services.gateway.planning.media.items import Expansion, TokenRun
from paceline.services.gateway.planning.media.processors.col import read_colpali, read_colqwen2
from tests.services.gateway.planning.media.processors.pictures import picture, values

SIZES = [(300, 200), (64, 700), (28, 28), (511, 513)]
PALI: dict[str, Any] = {"vlm_config": {"image_token_id": 5, "vision_config": {"image_size": 112, "patch_size": 14}}}


def only_run(expansion: Expansion) -> TokenRun:
    (run,) = [piece for piece in expansion.pieces if isinstance(piece, TokenRun)]
    return run


@pytest.mark.parametrize("size", SIZES)
def test_images_of_colqwen2(size: tuple[int, int]) -> None:
    bounds = {"min_pixels": 56 * 56, "max_pixels": 1 << 17}
    pixels = picture(*size)
    made = Qwen2VLImageProcessorPil(**bounds)(pixels, return_tensors="np", input_data_format="channels_last")
    _, rows, columns = made["image_grid_thw"][0]
    expansion = read_colqwen2({}, bounds).image(pixels)
    run = only_run(expansion)
    assert expansion.pieces == (151652, run, 151653)
    assert (run.token_id, run.grid, run.input.length) == (151655, None, rows * columns // 4)
    patches = made["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
    frame = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 14, columns * 14, 3)
    mean, deviation = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    assert np.abs(np.round((frame * deviation + mean) * 255) - values(run.input)).max() <= 1


@pytest.mark.parametrize("size", SIZES)
def test_images_of_colpali(size: tuple[int, int]) -> None:
    pixels, side = picture(*size), {"height": 112, "width": 112}
    made = SiglipImageProcessorPil(size=side, resample=3)
    (wanted,) = made(pixels, return_tensors="np", input_data_format="channels_last")["pixel_values"]
    run = only_run(read_colpali(PALI, {"size": side, "resample": 3}).image(pixels))
    assert (run.token_id, run.grid, run.input.length) == (5, None, 64)
    assert np.abs(np.round((wanted.transpose(1, 2, 0) * 0.5 + 0.5) * 255) - values(run.input)).max() <= 1


def test_pixels_that_are_scaled_otherwise_are_refused() -> None:
    for read, name in ((read_colqwen2, "those of CLIP"), (read_colpali, "must be 0.5")):
        with pytest.raises(ModelError, match=name):
            read(PALI, {"image_mean": [0.4, 0.4, 0.4]})
