"""LLaVA's preprocessing against CLIP's in transformers, and its settings."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.services.gateway.planning.media.items import TokenRun
from paceline.services.gateway.planning.media.processors.llava import LlavaProcessor, read_llava

CONFIG = {"vision_config": {"image_size": 56, "patch_size": 14}, "image_token_index": 7}


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def run_of(processor: LlavaProcessor, pixels: np.ndarray) -> TokenRun:
    (run,) = processor.image(pixels).pieces
    assert isinstance(run, TokenRun)
    return run


@pytest.mark.parametrize("size", [(56, 56), (30, 200), (401, 300), (7, 9), (57, 2000)], ids=str)
@pytest.mark.parametrize("shortest", [56, 40], ids=str)
def test_an_image_has_the_pixels_that_transformers_gives_it(size: tuple[int, int], shortest: int) -> None:
    settings = {"size": {"shortest_edge": shortest}, "crop_size": {"height": 56, "width": 56}}
    pixels = picture(*size)
    made = CLIPImageProcessorPil(**settings)(pixels, do_rescale=False, do_normalize=False, return_tensors="np")
    run = run_of(read_llava(CONFIG, settings), pixels)
    wanted = np.moveaxis(made["pixel_values"][0], 0, -1)
    assert (run.token_id, run.input.shape) == (7, (56, 56, 3))
    assert run.input.data == wanted.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("vision", "settings", "length"),
    [
        ({}, {}, 16),
        ({}, {"vision_feature_select_strategy": "full"}, 17),
        ({"model_type": "siglip_vision_model"}, {"vision_feature_select_strategy": "full"}, 16),
        ({"image_size": 70}, {"patch_size": 7}, 100),
    ],
)
def test_tokens_of_an_image(vision: dict[str, object], settings: dict[str, object], length: int) -> None:
    config = {**CONFIG, "vision_config": {**CONFIG["vision_config"], **vision}}
    assert run_of(read_llava(config, settings), picture(20, 30)).input.length == length


def test_settings_of_old_models_are_numbers() -> None:
    made = read_llava(CONFIG, {"size": 40, "crop_size": 30, "resample": 2})
    assert (made.size, made.crop, made.resample) == (40, (30, 30), 2)
    made = read_llava(CONFIG, {"do_resize": False, "do_center_crop": False})
    assert (made.size, made.crop) == (None, None)


def test_what_it_does_not_have_is_refused() -> None:
    processor = read_llava(CONFIG, {})
    with pytest.raises(ModelError, match="do_pad"):
        read_llava(CONFIG, {"image_processor": {"do_pad": True}})
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
        processor.with_options({"max_soft_tokens": 70})
    with pytest.raises(InvalidRequestError, match="2000 x 1 pixels"):
        processor.image(picture(1, 2000))
