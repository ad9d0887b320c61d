"""The loading of encoders, and the inputs that they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaKind
from paceline.kernels.native import NativeKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.loader import load_encoders, load_model
from tests.models.encoder_cases import CPU, INPUTS, change, encode, load
from tests.tiny_checkpoints import write_tiny


@pytest.mark.parametrize("kind", ["gemma3", "unified", "edge", "qwen3_vl"])
@pytest.mark.parametrize("outer", ["", "model."])
def test_spellings_of_names(encoder_checkpoint: Any, tmp_path: Path, kind: str, outer: str) -> None:
    folder, _ = encoder_checkpoint(kind)
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
        return name if name.startswith("lm_head") else outer + name

    changed = change(folder, tmp_path, lambda own: {renamed(name): tensor for name, tensor in own.items()})
    for media, tensor in INPUTS[kind]:
        assert torch.equal(encode(load(changed), media, tensor), encode(load(folder), media, tensor))


@pytest.mark.parametrize(
    ("missing", "fails", "loads"),
    [("language_model", load_model, load_encoders), ("vision_tower", load_encoders, load_model)],
    ids=["encoders", "text"],
)
def test_encoders_and_the_text_model_read_only_their_own_tensors(
    encoder_checkpoint: Any, tmp_path: Path, missing: str, fails: Any, loads: Any
) -> None:
    folder, _ = encoder_checkpoint("edge")
    change(folder, tmp_path, lambda own: {name: each for name, each in own.items() if missing not in name})
    with pytest.raises(ModelError, match=r"missing tensors: model\."):
        fails(tmp_path, torch.float32, ReferenceKernels(), CPU)
    assert loads(tmp_path, torch.float32, ReferenceKernels(), CPU) is not None


def test_a_tensor_that_nobody_knows(encoder_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = encoder_checkpoint("gemma3")
    changed = change(folder, tmp_path, lambda own: own | {"vision_tower.head.probe": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"unexpected tensors: vision_tower\.head\.probe"):
        load(changed)


def test_workers_share_packed_weights(encoder_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = encoder_checkpoint("edge")
    kernels = NativeKernels(2)
    load_model(folder, torch.float32, kernels, CPU, tmp_path)
    (text,) = tmp_path.glob("*.shards")
    for _ in range(2):
        shared = load_encoders(folder, torch.float32, kernels, CPU, tmp_path)
        assert shared is not None
        for media, tensor in INPUTS["edge"]:
            assert torch.equal(encode(shared, media, tensor), encode(load(folder), media, tensor))
    assert text in (files := list(tmp_path.glob("*.shards")))
    assert len(files) == 2


def test_a_model_of_text_has_no_encoders(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma4")
    assert load_encoders(tmp_path, torch.float32, ReferenceKernels(), CPU) is None


def test_between_is_called_before_each_piece(encoder_checkpoint: Any) -> None:
    encoders = load(encoder_checkpoint("edge")[0])
    # Both have two layers. A layer of vision has two parts, and its patches are embedded before.
    for (media, tensor), calls in zip(INPUTS["edge"], (5, 2)):
        between = mock.Mock()
        with torch.inference_mode():
            encoders.encode(media, tensor, between)
        assert between.call_count == calls


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
        ("qwen3_vl", MediaKind.IMAGE, (32, 48, 3), "multiples of 32, not [32, 48, 3]"),
        ("qwen3_vl", MediaKind.IMAGE, (0, 32, 3), "multiples of 32"),
        ("qwen3_vl", MediaKind.IMAGE, (3,), "[height, width, 3]"),
        ("qwen3_vl", MediaKind.VIDEO_FRAME, (3, 32, 32, 3), "frames [2, height, width, 3]"),
        ("qwen3_vl", MediaKind.VIDEO_FRAME, (2, 32, 32, 4), "frames [2, height, width, 3]"),
        ("dense", MediaKind.AUDIO, (20, 8), "does not read inputs of kind audio; it reads: image, video_frame"),
    ],
)
def test_inputs_of_other_shapes(
    encoder_checkpoint: Any, kind: str, media: MediaKind, shape: tuple[int, ...], message: str
) -> None:
    encoders = load(encoder_checkpoint(kind)[0], ReferenceKernels())
    for attempt in (
        lambda: encoders.rows(media, shape),
        lambda: encoders.encode(media, torch.zeros(shape, dtype=torch.uint8)),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            attempt()
        assert message in str(caught.value)


def test_inputs_of_another_dtype(encoder_checkpoint: Any) -> None:
    encoders = load(encoder_checkpoint("edge")[0], ReferenceKernels())
    with pytest.raises(InvalidRequestError, match="kind image must be uint8, not float32"):
        encoders.encode(MediaKind.IMAGE, torch.zeros(48, 48, 3))
    with pytest.raises(InvalidRequestError, match="kind audio must be float32, not float64"):
        encoders.encode(MediaKind.AUDIO, torch.zeros(4, 8, dtype=torch.float64))
