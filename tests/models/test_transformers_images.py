"""Encoders of images that run in `transformers`: rows are its own, also of the inputs that the gateway makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaKind
from paceline.kernels import select_kernels
from paceline.models.config import encoding_size, has_native_encoders
from paceline.models.loader import load_encoders
from paceline.services.gateway.planning.media.items import TokenRun
from paceline.services.gateway.planning.media.processors.families import read_processor
from tests.tiny_checkpoints import write_llava

CPU = torch.device("cpu")
WAYS = {
    ("clip", "default"): (CLIPImageProcessorPil, 16),
    ("clip", "full"): (CLIPImageProcessorPil, 17),
    ("siglip", "full"): (SiglipImageProcessorPil, 16),
}


@pytest.mark.parametrize("size", [(28, 28), (100, 37), (9, 50)], ids=str)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_rows_are_those_of_transformers(tmp_path: Path, way: tuple[str, str], size: tuple[int, int]) -> None:
    reference = write_llava(tmp_path, *way)
    make, length = WAYS[way]
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    pixels = np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8)
    wanted_pixels = make(**settings)(pixels, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        (wanted,) = reference.model.get_image_features(wanted_pixels, return_dict=True).pooler_output
    processor = read_processor(tmp_path)
    assert processor is not None
    (run,) = processor.image(pixels).pieces
    assert isinstance(run, TokenRun)
    given = torch.from_numpy(np.frombuffer(run.input.data, np.uint8).reshape(run.input.shape).copy())
    encoders = load_encoders(tmp_path, torch.float32, select_kernels(CPU, "native"), CPU)
    assert encoders is not None
    layers: list[None] = []
    with torch.inference_mode():
        rows = encoders.encode(MediaKind.IMAGE, given, between=lambda: layers.append(None))
    assert len(rows) == run.input.length == length == encoders.rows(MediaKind.IMAGE, run.input.shape)
    assert len(layers) == 3
    assert rows.shape[1] == encoding_size(tmp_path, "auto")
    torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(InvalidRequestError, match="must be"):
        encoders.rows(MediaKind.IMAGE, (14, 14, 3))
    with pytest.raises(InvalidRequestError, match="does not read"):
        encoders.rows(MediaKind.AUDIO, (14,))


def test_it_has_no_encoders_for_encode_workers(tmp_path: Path) -> None:
    write_llava(tmp_path)
    assert not has_native_encoders(tmp_path, "auto")


def test_settings_must_say_how_pixels_are_scaled(tmp_path: Path) -> None:
    write_llava(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="image_mean"):
        load_encoders(tmp_path, torch.float32, select_kernels(CPU, "native"), CPU)
