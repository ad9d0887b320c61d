"""Encodings of tiny random checkpoints against `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from paceline.core.media import MediaKind
from paceline.kernels import select_kernels
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.encoders import pieces
from tests.models.encoder_cases import CPU, INPUTS, audio, change, encode, image, load, sound

BACKENDS: list[Callable[[], Kernels]] = [lambda: NativeKernels(2), ReferenceKernels]
on_backends = pytest.mark.parametrize("backend", BACKENDS, ids=["native", "reference"])


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def reference_of_patches(model: Any, pixels: Tensor, side: int, padded: int) -> Tensor:
    """Return the encoding of an image by a Gemma 4 of `transformers`, in which `padded` further patches are ignored."""
    colors_first = pixels.permute(2, 0, 1).numpy() / np.float32(255)
    patches = torch.from_numpy(convert_image_to_patches(colors_first, side)).float()
    grid = np.meshgrid(np.arange(pixels.shape[1] // side), np.arange(pixels.shape[0] // side), indexing="xy")
    positions = torch.from_numpy(np.stack(grid, axis=-1)).view(-1, 2)
    patches = torch.nn.functional.pad(patches, (0, 0, 0, padded))
    positions = torch.nn.functional.pad(positions, (0, 0, 0, padded), value=-1)
    with torch.inference_mode():
        (expected,) = model.model.get_image_features(patches[None], positions[None]).pooler_output
    return expected  # type: ignore[no-any-return]


@on_backends
@pytest.mark.parametrize("kind", ["edge", "dense"])
@pytest.mark.parametrize("size", [(48, 48), (96, 240), (336, 48)], ids=str)
def test_images_of_gemma4(encoder_checkpoint: Any, backend: Any, kind: str, size: tuple[int, int]) -> None:
    folder, reference = encoder_checkpoint(kind)
    pixels = image(*size)
    expected = reference_of_patches(reference, pixels, 16, padded=18)
    encoders = load(folder, backend())
    found = encode(encoders, MediaKind.IMAGE, pixels)
    same(found, expected)
    assert torch.equal(encode(encoders, MediaKind.VIDEO_FRAME, pixels), found)


@on_backends
@pytest.mark.parametrize("size", [(12, 12), (24, 60), (84, 12)], ids=str)
def test_images_of_the_unified_gemma4(encoder_checkpoint: Any, backend: Any, size: tuple[int, int]) -> None:
    folder, reference = encoder_checkpoint("unified")
    pixels = image(*size)
    same(
        encode(load(folder, backend()), MediaKind.IMAGE, pixels), reference_of_patches(reference, pixels, 12, padded=3)
    )


@on_backends
def test_images_of_gemma3(encoder_checkpoint: Any, backend: Any) -> None:
    folder, reference = encoder_checkpoint("gemma3")
    pixels = image(56, 56)
    normalized = pixels.permute(2, 0, 1)[None].float() / 255 * 2 - 1
    with torch.inference_mode():
        (expected,) = reference.model.get_image_features(normalized).pooler_output
    same(encode(load(folder, backend()), MediaKind.IMAGE, pixels), expected)


def reference_of_qwen3_vl(model: Any, frames: Tensor) -> Tensor:
    """Return the encoding of frames uint8 [2, height, width, 3] by a Qwen of `transformers`: all parts of rows.

    transformers cuts patches of an image, in which the second frame repeats the first. So patches of each of the frames
    have the half that a pair needs.
    """
    side = model.config.vision_config.patch_size
    processor = Qwen2VLImageProcessorPil(
        patch_size=side, do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3, return_tensors="pt"
    )
    cut = [processor(own.permute(2, 0, 1).numpy()) for own in frames]
    first, second = (own["pixel_values"].view(-1, 3, 2, side, side) for own in cut)
    patches = torch.cat([first[:, :, :1], second[:, :, 1:]], dim=2).flatten(1)
    with torch.inference_mode():
        found = model.model.get_image_features(patches, cut[0]["image_grid_thw"])
    return torch.cat([own for (own,) in (found.pooler_output, *getattr(found, "deepstack_features", ()))], dim=1)


@on_backends
@pytest.mark.parametrize(
    ("kind", "size"), [("qwen3_vl", (32, 32)), ("qwen3_vl", (64, 224)), ("qwen3_5", (64, 224)), ("qwen3_vl", (320, 96))]
)
def test_images_and_frames_of_qwen(encoder_checkpoint: Any, backend: Any, kind: str, size: tuple[int, int]) -> None:
    folder, reference = encoder_checkpoint(kind)
    encoders, pixels = load(folder, backend()), image(*size)
    pair = torch.stack([pixels, 255 - pixels])
    same(encode(encoders, MediaKind.IMAGE, pixels), reference_of_qwen3_vl(reference, pixels.expand(2, -1, -1, -1)))
    same(encode(encoders, MediaKind.VIDEO_FRAME, pair), reference_of_qwen3_vl(reference, pair))


@on_backends
@pytest.mark.parametrize("samples", [1_000, 8_000, 20_001])
def test_audio_of_gemma4(encoder_checkpoint: Any, backend: Any, samples: int) -> None:
    folder, reference = encoder_checkpoint("edge")
    extractor = transformers.Gemma4AudioFeatureExtractor(feature_size=8)
    inputs = extractor([audio(samples)], pad_to_multiple_of=6_400, return_tensors="pt")
    features, mask = inputs["input_features"], inputs["input_features_mask"]
    assert not mask.all()  # transformers pads the samples
    with torch.inference_mode():
        own = reference.model.get_audio_features(features, mask)
    expected = own.pooler_output[0][own.attention_mask[0]]
    same(encode(load(folder, backend()), MediaKind.AUDIO, features[0][mask[0]]), expected)


@on_backends
@pytest.mark.parametrize("samples", [1, 16, 75])
def test_audio_of_the_unified_gemma4(encoder_checkpoint: Any, backend: Any, samples: int) -> None:
    folder, reference = encoder_checkpoint("unified")
    inputs = transformers.Gemma4UnifiedAudioFeatureExtractor(feature_size=16, audio_samples_per_token=16)(
        audio(samples), return_tensors="pt"
    )
    with torch.inference_mode():
        own = reference.model.get_audio_features(inputs["input_features"], inputs["input_features_mask"])
    found = encode(load(folder, backend()), MediaKind.AUDIO, sound(samples))
    same(found, own.pooler_output[0])


@on_backends
@pytest.mark.parametrize("kind", INPUTS)
def test_bfloat16(encoder_checkpoint: Any, backend: Any, kind: str) -> None:
    folder, _ = encoder_checkpoint(kind)
    exact, rounded = load(folder), load(folder, backend(), torch.bfloat16)
    for media, tensor in INPUTS[kind]:
        expected, found = (encode(own, media, tensor).float() for own in (exact, rounded))
        assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_encoders_on_a_gpu(encoder_checkpoint: Any, kind: str) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    folder, _ = encoder_checkpoint(kind)
    encoders = load(folder, select_kernels(CPU, "triton-invariant"))
    for media, tensor in INPUTS[kind]:
        found = encode(encoders, media, tensor)
        same(found, encode(load(folder), media, tensor))
        for _ in range(2):  # the layers are recorded, and then replayed
            assert torch.equal(encode(encoders, media, tensor), found)


def test_pooled_rows_may_be_too_large_for_float16(encoder_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = encoder_checkpoint("edge")
    last = "model.vision_tower.encoder.layers.1.post_feedforward_layernorm.weight"
    changed = change(folder, tmp_path, lambda own: own | {last: own[last].abs() * 10_000})
    exact, rounded = (load(changed, ReferenceKernels(), dtype) for dtype in (torch.float32, torch.float16))
    expected, found = (encode(own, MediaKind.IMAGE, image(96, 96)).float() for own in (exact, rounded))
    assert found.isfinite().all()
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", INPUTS)
def test_bits_do_not_depend_on_pieces(encoder_checkpoint: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders = load(encoder_checkpoint(kind)[0])
    whole = [encode(encoders, *own) for own in INPUTS[kind]]
    monkeypatch.setattr(pieces, "PIECE_ROWS", 8)  # as many as fill vectors: torch computes the rest in another way
    monkeypatch.setattr(pieces, "_LEAST_ROWS", 1)
    for own, expected in zip(INPUTS[kind], whole):
        assert torch.equal(encode(encoders, *own), expected)
