"""Encodings of tiny random checkpoints against `transformers`, and the loading of encoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaKind
from paceline.kernels import select_kernels
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.encoders.base import Encoders
from paceline.models.encoders.blocks import pool
from paceline.models.encoders.local_attention import attend_locally
from paceline.models.loader import load_encoders, load_model
from tests.tiny_checkpoints import write_gemma3_with_vision, write_gemma4_unified, write_gemma4_with_media, write_tiny

CPU = torch.device("cpu")
BACKENDS: list[Callable[[], Kernels]] = [lambda: NativeKernels(2), ReferenceKernels]
on_backends = pytest.mark.parametrize("backend", BACKENDS, ids=["native", "reference"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A function that returns a tiny checkpoint and its `transformers` model, by the name of its kind."""
    writers: dict[str, Callable[[Path], Any]] = {
        "gemma3": write_gemma3_with_vision,
        "unified": write_gemma4_unified,
        "edge": lambda folder: write_gemma4_with_media(folder, "edge"),
        "dense": lambda folder: write_gemma4_with_media(folder, "dense"),
    }
    known: dict[str, tuple[Path, Any]] = {}

    def write(kind: str) -> tuple[Path, Any]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            known[kind] = folder, writers[kind](folder)
        return known[kind]

    return write


def load(folder: Path, kernels: Kernels | None = None, dtype: torch.dtype = torch.float32) -> Encoders:
    encoders = load_encoders(folder, dtype, kernels or NativeKernels(2), CPU)
    assert encoders is not None
    return encoders


def encode(encoders: Encoders, kind: MediaKind, tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        found = encoders.encode(kind, tensor)
    assert found.shape == (encoders.rows(kind, tensor.shape), encoders.hidden_size)
    assert found.dtype == encoders.dtype
    return found


def image(height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def audio(samples: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).normal(0, 0.3, samples).astype(np.float32)


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
def test_images_of_gemma4(checkpoint: Any, backend: Any, kind: str, size: tuple[int, int]) -> None:
    folder, reference = checkpoint(kind)
    pixels = image(*size)
    expected = reference_of_patches(reference, pixels, 16, padded=18)
    encoders = load(folder, backend())
    found = encode(encoders, MediaKind.IMAGE, pixels)
    same(found, expected)
    assert torch.equal(encode(encoders, MediaKind.VIDEO_FRAME, pixels), found)


@on_backends
@pytest.mark.parametrize("size", [(12, 12), (24, 60), (84, 12)], ids=str)
def test_images_of_the_unified_gemma4(checkpoint: Any, backend: Any, size: tuple[int, int]) -> None:
    folder, reference = checkpoint("unified")
    pixels = image(*size)
    same(
        encode(load(folder, backend()), MediaKind.IMAGE, pixels), reference_of_patches(reference, pixels, 12, padded=3)
    )


@on_backends
def test_images_of_gemma3(checkpoint: Any, backend: Any) -> None:
    folder, reference = checkpoint("gemma3")
    pixels = image(56, 56)
    normalized = pixels.permute(2, 0, 1)[None].float() / 255 * 2 - 1
    with torch.inference_mode():
        (expected,) = reference.model.get_image_features(normalized).pooler_output
    same(encode(load(folder, backend()), MediaKind.IMAGE, pixels), expected)


@on_backends
@pytest.mark.parametrize("samples", [1_000, 8_000, 20_001])
def test_audio_of_gemma4(checkpoint: Any, backend: Any, samples: int) -> None:
    folder, reference = checkpoint("edge")
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
def test_audio_of_the_unified_gemma4(checkpoint: Any, backend: Any, samples: int) -> None:
    folder, reference = checkpoint("unified")
    inputs = transformers.Gemma4UnifiedAudioFeatureExtractor(feature_size=16, audio_samples_per_token=16)(
        audio(samples), return_tensors="pt"
    )
    with torch.inference_mode():
        own = reference.model.get_audio_features(inputs["input_features"], inputs["input_features_mask"])
    found = encode(load(folder, backend()), MediaKind.AUDIO, sound(samples))
    same(found, own.pooler_output[0])


def sound(*shape: int) -> Tensor:
    return torch.from_numpy(audio(math.prod(shape))).view(shape)


INPUTS = {
    "edge": [(MediaKind.IMAGE, image(48, 96)), (MediaKind.AUDIO, sound(50, 8))],
    "unified": [(MediaKind.IMAGE, image(24, 36)), (MediaKind.AUDIO, sound(100))],
    "gemma3": [(MediaKind.IMAGE, image(56, 56))],
}


@on_backends
@pytest.mark.parametrize("kind", INPUTS)
def test_bfloat16(checkpoint: Any, backend: Any, kind: str) -> None:
    folder, _ = checkpoint(kind)
    exact, rounded = load(folder), load(folder, backend(), torch.bfloat16)
    for media, tensor in INPUTS[kind]:
        expected, found = (encode(own, media, tensor).float() for own in (exact, rounded))
        assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_encoders_on_a_gpu(checkpoint: Any, kind: str) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    folder, _ = checkpoint(kind)
    encoders = load(folder, select_kernels(CPU, "triton-invariant"))
    for media, tensor in INPUTS[kind]:
        same(encode(encoders, media, tensor), encode(load(folder), media, tensor))


def change(folder: Path, to: Path, tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Copy a checkpoint with other tensors."""
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors(load_file(folder / "model.safetensors")), to / "model.safetensors")
    return to


def test_pooled_rows_may_be_too_large_for_float16(checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint("edge")
    last = "model.vision_tower.encoder.layers.1.post_feedforward_layernorm.weight"
    changed = change(folder, tmp_path, lambda own: own | {last: own[last].abs() * 10_000})
    exact, rounded = (load(changed, ReferenceKernels(), dtype) for dtype in (torch.float32, torch.float16))
    expected, found = (encode(own, MediaKind.IMAGE, image(96, 96)).float() for own in (exact, rounded))
    assert found.isfinite().all()
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", ["gemma3", "unified", "edge"])
@pytest.mark.parametrize("outer", ["", "model."])
def test_spellings_of_names(checkpoint: Any, tmp_path: Path, kind: str, outer: str) -> None:
    folder, _ = checkpoint(kind)
    other = [
        ("vision_tower.embeddings", "vision_tower.vision_model.embeddings"),
        ("vision_tower.encoder", "vision_tower.vision_model.encoder"),
        ("vision_tower.post_layernorm", "vision_tower.vision_model.post_layernorm"),
        ("embed_vision.embedding_projection", "embed_vision.multimodal_embedder.embedding_projection"),
        ("vision_embedder.", "embed_vision."),
    ]

    def renamed(name: str) -> str:
        name = name.removeprefix("model.")
        if outer and kind != "edge":
            for before, after in other:
                name = name.replace(before, after)
        return outer + name

    changed = change(folder, tmp_path, lambda own: {renamed(name): tensor for name, tensor in own.items()})
    for media, tensor in INPUTS[kind]:
        assert torch.equal(encode(load(changed), media, tensor), encode(load(folder), media, tensor))


@pytest.mark.parametrize(
    ("missing", "fails", "loads"),
    [("language_model", load_model, load_encoders), ("vision_tower", load_encoders, load_model)],
    ids=["encoders", "text"],
)
def test_encoders_and_the_text_model_read_only_their_own_tensors(
    checkpoint: Any, tmp_path: Path, missing: str, fails: Any, loads: Any
) -> None:
    folder, _ = checkpoint("edge")
    change(folder, tmp_path, lambda own: {name: each for name, each in own.items() if missing not in name})
    with pytest.raises(ModelError, match=r"missing tensors: model\."):
        fails(tmp_path, torch.float32, ReferenceKernels(), CPU)
    assert loads(tmp_path, torch.float32, ReferenceKernels(), CPU) is not None


def test_a_tensor_that_nobody_knows(checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint("gemma3")
    changed = change(folder, tmp_path, lambda own: own | {"vision_tower.head.probe": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"unexpected tensors: vision_tower\.head\.probe"):
        load(changed)


def test_workers_share_packed_weights(checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint("edge")
    kernels = NativeKernels(2)
    load_model(folder, torch.float32, kernels, CPU, tmp_path)
    (text,) = tmp_path.glob("*.packed")
    for _ in range(2):
        shared = load_encoders(folder, torch.float32, kernels, CPU, tmp_path)
        assert shared is not None
        for media, tensor in INPUTS["edge"]:
            assert torch.equal(encode(shared, media, tensor), encode(load(folder), media, tensor))
    assert text in (files := list(tmp_path.glob("*.packed")))
    assert len(files) == 2


def test_a_model_of_text_has_no_encoders(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma4")
    assert load_encoders(tmp_path, torch.float32, ReferenceKernels(), CPU) is None


def test_between_is_called_before_each_layer(checkpoint: Any) -> None:
    encoders = load(checkpoint("edge")[0])
    for media, tensor in INPUTS["edge"]:
        between = mock.Mock()
        with torch.inference_mode():
            encoders.encode(media, tensor, between)
        assert between.call_count == 2


@pytest.mark.parametrize(
    ("kind", "media", "shape", "message"),
    [
        ("edge", MediaKind.IMAGE, (48, 50, 3), "multiples of 48 and at most 480, not [48, 50, 3]"),
        ("edge", MediaKind.IMAGE, (0, 48, 3), "multiples of 48"),
        ("edge", MediaKind.IMAGE, (48, 48), "[height, width, 3]"),
        ("edge", MediaKind.VIDEO_FRAME, (48, 528, 3), "at most 480"),
        ("edge", MediaKind.AUDIO, (20, 9), "log-mel features [frames, 8], not [20, 9]"),
        ("edge", MediaKind.AUDIO, (0, 8), "log-mel features"),
        ("unified", MediaKind.IMAGE, (12, 108, 3), "multiples of 12 and at most 96"),
        ("unified", MediaKind.AUDIO, (20, 8), "samples [samples], not [20, 8]"),
        ("gemma3", MediaKind.IMAGE, (56, 28, 3), "must be [56, 56, 3], not [56, 28, 3]"),
        ("gemma3", MediaKind.AUDIO, (20,), "does not read inputs of kind audio; it reads: image"),
        ("dense", MediaKind.AUDIO, (20, 8), "does not read inputs of kind audio; it reads: image, video_frame"),
    ],
)
def test_inputs_of_other_shapes(
    checkpoint: Any, kind: str, media: MediaKind, shape: tuple[int, ...], message: str
) -> None:
    encoders = load(checkpoint(kind)[0], ReferenceKernels())
    for attempt in (
        lambda: encoders.rows(media, shape),
        lambda: encoders.encode(media, torch.zeros(shape, dtype=torch.uint8)),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            attempt()
        assert message in str(caught.value)


def test_inputs_of_another_dtype(checkpoint: Any) -> None:
    encoders = load(checkpoint("edge")[0], ReferenceKernels())
    with pytest.raises(InvalidRequestError, match="kind image must be uint8, not float32"):
        encoders.encode(MediaKind.IMAGE, torch.zeros(48, 48, 3))
    with pytest.raises(InvalidRequestError, match="kind audio must be float32, not float64"):
        encoders.encode(MediaKind.AUDIO, torch.zeros(4, 8, dtype=torch.float64))


@given(rows=st.integers(1, 30), window=st.integers(1, 7), heads=st.integers(1, 3))
def test_local_attention_is_attention_with_a_mask(rows: int, window: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    queries, keys, values = torch.randn(3, rows, heads, 4, generator=generator)
    distances = torch.randn(window, heads, 4, generator=generator)
    row = torch.arange(rows)
    distance = row.unsqueeze(1) - row
    seen = (distance >= 0) & (distance < window)
    by_key = keys + distances[distance.clamp(0, window - 1)]  # [query, key, heads, 4]
    scores = 5.0 * torch.tanh(torch.einsum("qhd,qkhd->hqk", queries, by_key) / 5.0)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    torch.testing.assert_close(attend_locally(queries, keys, values, distances, 5.0), expected)


def test_pooling_means_squares() -> None:
    x = torch.arange(24.0).view(24, 1).expand(-1, 2)  # four rows of six patches
    assert pool(x, 6, 2)[:, 1].tolist() == [3.5, 5.5, 7.5, 15.5, 17.5, 19.5]
