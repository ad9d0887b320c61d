"""Gemma 4's preprocessing against transformers' own, where that runs without torchvision."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaInput, MediaKind
from paceline.services.common.rpc import MAX_MESSAGE_BYTES
from paceline.services.common.wire import media_input_to_pb
from paceline.services.gateway.planning.media.items import Expansion, TokenRun
from paceline.services.gateway.planning.media.processors.base import media_input
from paceline.services.gateway.planning.media.processors.gemma4 import (
    BUDGETS,
    Gemma4Processor,
    fitted_size,
    read_gemma4,
)
from tests.services.gateway.planning.media.processors.pictures import picture, values

CONFIG = {"model_type": "gemma4", "vision_config": {"patch_size": 16}, "audio_config": {"hidden_size": 8}}
BOI, IMAGE, EOI, VIDEO, BOA, AUDIO, EOA = 255999, 258880, 258882, 258884, 256000, 258881, 258883


def processor(**changes: object) -> Gemma4Processor:
    made = read_gemma4({**CONFIG, **changes}, {})
    assert made is not None
    return made


def only_input(expansion: Expansion) -> MediaInput:
    (run,) = [piece for piece in expansion.pieces if isinstance(piece, TokenRun)]
    return run.input


@pytest.mark.parametrize("budget", [70, 280, 1120])
@pytest.mark.parametrize("size", [(480, 640), (33, 50), (7, 900), (900, 7), (768, 768)])
def test_an_image_has_the_pixels_and_the_count_of_tokens_that_transformers_gives_it(
    size: tuple[int, int], budget: int
) -> None:
    pixels = picture(*size)
    reference = Gemma4ImageProcessorPil()(pixels, max_soft_tokens=budget, return_tensors="np")
    expansion = processor().with_options({"max_soft_tokens": budget}).image(pixels)
    own = only_input(expansion)
    (count,) = reference["num_soft_tokens_per_image"]
    assert (own.length, own.kind, own.dtype) == (count, MediaKind.IMAGE, "uint8")
    assert expansion.pieces[0] == BOI
    assert expansion.pieces[2] == EOI
    rows, columns = own.shape[0] // 16, own.shape[1] // 16
    patches = values(own).reshape(rows, 16, columns, 16, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    wanted = np.round(np.asarray(reference["pixel_values"][0][: rows * columns]) * 255).astype(np.uint8)
    np.testing.assert_array_equal(patches, wanted)


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from(BUDGETS))
def test_every_size_fits_into_its_budget_as_in_transformers(height: int, width: int, budget: int) -> None:
    fitted = fitted_size(height, width, budget)
    assert fitted == get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
    assert 0 < fitted[0] * fitted[1] <= budget * 48 * 48


def test_a_square_has_256_tokens_of_a_budget_of_280() -> None:
    assert only_input(processor().image(picture(100, 100))).length == 256


@pytest.mark.parametrize("samples", [161, 320, 321, 1000, 16_000, 480_000])
def test_audio_has_the_features_that_transformers_gives_it(samples: int) -> None:
    heard = np.random.default_rng(samples).uniform(-1, 1, samples).astype(np.float32)
    reference = Gemma4AudioFeatureExtractor()([heard], return_tensors="np")
    valid = np.asarray(reference["input_features_mask"][0])
    own = only_input(processor().audio(heard))
    np.testing.assert_allclose(values(own), np.asarray(reference["input_features"][0])[valid], atol=1e-5)
    # Two convolutions with stride 2 keep every second frame each.
    assert own.length == valid[::2][::2].sum()
    assert (own.kind, own.dtype) == (MediaKind.AUDIO, "float32")


def test_thirty_seconds_of_audio_are_750_tokens_and_longer_clips_are_refused() -> None:
    clip = np.random.default_rng(0).uniform(-1, 1, 481_602).astype(np.float32)
    whole = only_input(processor().audio(clip[:480_000]))
    assert whole.length == 750
    # MP3 and AAC make a clip longer by some milliseconds.
    assert only_input(processor().audio(clip[:481_600])) == whole
    with pytest.raises(InvalidRequestError, match=r"30\.1 seconds.*at most 30"):
        processor().audio(clip)


def test_samples_that_fit_into_no_message_are_refused_with_the_longest_clip() -> None:
    unified = processor(model_type="gemma4_unified")
    most = only_input(unified.audio(np.zeros(1047 * 16_000 + 1, np.float32)))
    assert most.shape == (1047 * 16_000,)
    assert media_input_to_pb(most).ByteSize() < MAX_MESSAGE_BYTES
    with pytest.raises(InvalidRequestError, match=r"1048\.0 seconds.*at most 1047"):
        unified.audio(np.zeros(1048 * 16_000, np.float32))


def test_an_input_that_fits_into_no_message_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="send a smaller one"):
        media_input(MediaKind.IMAGE, 1, np.zeros(MAX_MESSAGE_BYTES, np.uint8))


@pytest.mark.parametrize("changes", [{}, {"model_type": "gemma4_unified"}], ids=["features", "samples"])
def test_audio_without_sound_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="send a longer one"):
        processor(**changes).audio(np.zeros(0, np.float32))


@pytest.mark.parametrize("samples", [1, 639, 640, 641, 16_000, 600_000])
def test_a_unified_model_hears_the_samples_themselves(samples: int) -> None:
    heard = np.random.default_rng(samples).uniform(-1, 1, samples).astype(np.float32)
    reference = Gemma4UnifiedAudioFeatureExtractor()(heard, return_tensors="np")["input_features"][0]
    expansion = processor(model_type="gemma4_unified").audio(heard)
    own = only_input(expansion)
    np.testing.assert_array_equal(values(own), np.asarray(reference).reshape(-1))
    assert own.length == len(reference)
    assert (expansion.pieces[0], expansion.pieces[2]) == (BOA, EOA)


def test_a_video_is_frames_with_their_times() -> None:
    """Gemma4Processor needs torchvision; its text of a video is `MM:SS <|image>…<image|>`, joined by spaces."""
    frames = [picture(60, 80), picture(60, 81)]
    expansion = processor().video(frames, [0.0, 61.9])
    runs = [piece for piece in expansion.pieces if isinstance(piece, TokenRun)]
    shown = [piece for piece in expansion.pieces if not isinstance(piece, TokenRun)]
    assert shown == ["00:00 ", BOI, EOI, " 01:01 ", BOI, EOI]
    assert [run.token_id for run in runs] == [VIDEO, VIDEO]
    assert all(run.input.kind is MediaKind.VIDEO_FRAME and run.input.length <= 70 for run in runs)
    alone = only_input(processor().with_options({"max_soft_tokens": 70}).image(frames[0]))
    assert (runs[0].input.shape, runs[0].input.data) == (alone.shape, alone.data)
    assert runs[0].digest != alone.digest


def test_options_of_images_leave_videos_alone() -> None:
    made = processor().with_options({"max_soft_tokens": 1120, "videos_kwargs": {"num_frames": 8}})
    assert (made.budget, made.frame_budget, made.video_frames) == (1120, 70, 8)
    assert processor().with_options({"images_kwargs": {"max_soft_tokens": 560}}).budget == 560
    assert made.with_options({}) == made


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_soft_tokens": 100}, "must be one of 70, 140, 280, 560, 1120"),
        ({"max_soft_tokens": True}, "must be one of"),
        ({"videos_kwargs": {"num_frames": 33}}, "from 1 to 32"),
        ({"videos_kwargs": {"fps": 2}}, "no option 'fps'"),
        ({"images_kwargs": 5}, "must be an object"),
        ({"size": 5}, "no option 'size'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        processor().with_options(options)
    assert "mm_processor_kwargs" in str(caught.value)


def test_a_model_takes_what_its_config_has_encoders_for() -> None:
    assert processor().kinds == {"image", "video", "audio"}
    assert processor(audio_config=None).kinds == {"image", "video"}
    assert read_gemma4({**CONFIG, "vision_config": None, "audio_config": None}, {}) is None


def test_a_model_may_have_other_patches() -> None:
    made = processor(vision_config={"patch_size": 4, "pooling_kernel_size": 2})
    pixels = picture(100, 60)
    reference = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2)(pixels, return_tensors="np")
    own = only_input(made.image(pixels))
    assert own.length == reference["num_soft_tokens_per_image"][0] == own.shape[0] * own.shape[1] // 64
    samples = processor(model_type="gemma4_unified", audio_config={"audio_embed_dim": 10}).audio(
        np.ones(25, np.float32)
    )
    assert only_input(samples).length == 3


def test_the_models_settings_give_the_budget() -> None:
    made = read_gemma4(CONFIG, {"image_processor": {"max_soft_tokens": 560}})
    assert made is not None
    assert made.budget == 560
    with pytest.raises(ModelError, match="max_soft_tokens is 100"):
        read_gemma4(CONFIG, {"image_processor": {"max_soft_tokens": 100}})
