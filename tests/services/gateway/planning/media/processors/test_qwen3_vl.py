"""Qwen 3-VL's preprocessing against transformers' own, where that runs without torchvision.

`Qwen2VLImageProcessorPil` does. `Qwen3VLVideoProcessor` does not: its functions for the sizes and the numbers of frames
are called here by themselves, and the pixels are those that Pillow's bicubic filter makes of these sizes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as Reference
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_of_frames
from transformers.video_utils import VideoMetadata

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.media import MediaKind
from paceline.services.common.rpc import MAX_MESSAGE_BYTES
from paceline.services.common.wire import media_input_to_pb
from paceline.services.gateway.planning.media.items import Expansion, TokenRun
from paceline.services.gateway.planning.media.processors.qwen3_vl import (
    PixelBounds,
    Qwen3VLProcessor,
    frame_size,
    image_size,
    read_qwen3_vl,
)
from paceline.services.gateway.planning.media.video_decoder import sample
from tests.services.gateway.planning.media.processors.pictures import picture, values

START, END, IMAGE, VIDEO = 151652, 151653, 151655, 151656
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SMALL = {"min_pixels": 1 << 12, "max_pixels": 1 << 18}


def processor(settings: dict[str, Any] | None = None, **vision: int) -> Qwen3VLProcessor:
    return read_qwen3_vl({"vision_config": vision}, settings or {})


def runs(expansion: Expansion) -> list[TokenRun]:
    return [piece for piece in expansion.pieces if isinstance(piece, TokenRun)]


def only_run(expansion: Expansion) -> TokenRun:
    (run,) = runs(expansion)
    return run


def pixels_of_patches(patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return both frames [2, height, width, 3] whose patches transformers has normalized.

    Args:
        patches: [rows * columns * 4, 3 * 2 * 16 * 16], in the order of the squares of 2 x 2 patches.
        rows: rows of such squares.
        columns: columns of such squares.
    """
    grid = patches.reshape(rows, columns, 2, 2, 3, 2, 16, 16)
    frames = grid.transpose(5, 0, 2, 6, 1, 3, 7, 4).reshape(2, rows * 32, columns * 32, 3)
    return np.round((frames * 0.5 + 0.5) * 255).astype(np.uint8)


@settings(max_examples=40)
@given(st.tuples(st.integers(1, 300), st.integers(1, 300)).filter(lambda size: max(size) <= 200 * min(size)))
@example((480, 640))
@example((7, 1400))
@example((511, 513))
def test_an_image_has_the_pixels_and_the_grid_that_transformers_gives_it(size: tuple[int, int]) -> None:
    pixels = picture(*size)
    bounds = {"shortest_edge": SMALL["min_pixels"], "longest_edge": SMALL["max_pixels"]}
    made = Qwen2VLImageProcessorPil(patch_size=16, size=bounds, **HALF)
    reference = made(pixels, return_tensors="np", input_data_format="channels_last")
    expansion = processor().with_options(SMALL).image(pixels)
    run = only_run(expansion)
    own, (_, rows, columns) = run.input, reference["image_grid_thw"][0] // [1, 2, 2]
    assert (expansion.pieces[0], run.token_id, expansion.pieces[2]) == (START, IMAGE, END)
    assert (own.kind, own.length, run.grid) == (MediaKind.IMAGE, rows * columns, (1, rows, columns))
    for frame in pixels_of_patches(np.asarray(reference["pixel_values"]), rows, columns):
        np.testing.assert_array_equal(values(own), frame)


bounds_of_pixels = st.builds(PixelBounds, st.integers(1, 1 << 22), st.integers(1, 1 << 24), st.just(1 << 24))
sides = st.integers(1, 20_000)


@given(sides, sides, st.sampled_from([28, 32]), bounds_of_pixels)
def test_every_size_is_that_of_transformers(height: int, width: int, side: int, bounds: PixelBounds) -> None:
    given_sizes = {"factor": side, "min_pixels": bounds.least, "max_pixels": bounds.most}
    try:
        wanted = smart_resize(height, width, **given_sizes)
    except ValueError:
        with pytest.raises(InvalidRequestError, match="at most 200; cut it"):
            image_size(height, width, side, bounds)
        return
    fitted = image_size(height, width, side, bounds)
    assert fitted == wanted
    assert min(fitted) >= side


@given(st.integers(2, 768), sides, sides, bounds_of_pixels)
def test_every_size_of_frames_is_that_of_transformers(count: int, height: int, width: int, bounds: PixelBounds) -> None:
    given_sizes = {"factor": 32, "min_pixels": bounds.least, "max_pixels": bounds.most}
    try:
        wanted = smart_resize_of_frames(count, height, width, **given_sizes)
    except ValueError:
        with pytest.raises(InvalidRequestError, match="at most 200; cut it"):
            frame_size(count, height, width, 32, bounds)
        return
    fitted = frame_size(count, height, width, 32, bounds)
    assert fitted == wanted
    assert min(fitted) >= 32


@pytest.mark.parametrize(("ratio", "is_taken"), [(200, True), (201, False)])
def test_an_image_may_be_200_times_as_long_as_wide(ratio: int, is_taken: bool) -> None:
    pixels = np.zeros((2, 2 * ratio, 3), np.uint8)
    if is_taken:
        assert only_run(processor().image(pixels)).input.length > 0
        return
    with pytest.raises(InvalidRequestError, match=r"one side is 201\.0 times as long as the other"):
        processor().image(pixels)
    with pytest.raises(InvalidRequestError, match=r"one side is 201\.0 times"):
        processor().video([pixels.transpose(1, 0, 2)], [0.0])


@given(st.integers(1, 5000), st.floats(1, 240), st.one_of(st.floats(0.1, 30), st.just(2)))
def test_frames_are_those_that_transformers_takes(total: int, rate: float, fps: float) -> None:
    own = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    wanted = Qwen3VLVideoProcessor.sample_frames(own, VideoMetadata(total, fps=rate), fps=fps)
    assert sample(total, rate, processor().with_options({"fps": fps}).sampling) == list(wanted)
    if total >= 4:
        wanted = Qwen3VLVideoProcessor.sample_frames(SimpleNamespace(fps=None), VideoMetadata(total), num_frames=4)
        assert sample(total, rate, processor().with_options({"num_frames": 4}).sampling) == list(wanted)


def text_of_reference(numbers: list[int], rate: float, rows: int, columns: int) -> str:
    """Return what `Qwen3VLProcessor` makes of the place of a video in the chat template."""
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
        all_special_multimodal_tokens=["<|video_pad|>"],
        _calculate_timestamps=lambda *given: Reference._calculate_timestamps(None, *given),
    )
    inputs = {
        "video_grid_thw": np.array([[(len(numbers) + 1) // 2, rows * 2, columns * 2]]),
        "video_metadata": [SimpleNamespace(fps=rate, frames_indices=list(numbers))],
    }
    replacement = Reference.replace_video_token(own, inputs, 0)
    rendered = ["<|vision_start|><|video_pad|><|vision_end|>"]
    (text,), _ = Reference.get_text_with_replacements(own, rendered, [], [replacement])
    return str(text)


TEXTS: dict[int | str, str] = {START: "<|vision_start|>", END: "<|vision_end|>"}


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_video_is_pairs_of_frames_with_their_times(count: int) -> None:
    frames = [np.roll(picture(60, 80), 3 * number, axis=1) for number in range(count)]
    numbers = [round(number * 12.7) for number in range(count)]
    expansion = processor().video(frames, [number / 25 for number in numbers])
    found = runs(expansion)
    grid = found[0].grid
    assert grid is not None
    assert processor().tokens_of("video", (count, 60, 80, 3)) == sum(run.input.length for run in found)
    _, rows, columns = grid
    shown = [
        piece
        if isinstance(piece, str)
        else TEXTS[piece]
        if isinstance(piece, int)
        else "<|video_pad|>" * rows * columns
        for piece in expansion.pieces
    ]
    assert "".join(map(str, shown)) == text_of_reference(numbers, 25.0, rows, columns)
    height, width = smart_resize_of_frames(max(2, count), 60, 80, factor=32, min_pixels=1 << 12, max_pixels=24 << 20)
    wanted = [np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)) for frame in frames]
    wanted += wanted[-1:] * (count % 2)
    for number, run in enumerate(found):
        own = run.input
        assert (own.kind, own.length, run.grid) == (MediaKind.VIDEO_FRAME, height * width // 1024, grid)
        np.testing.assert_array_equal(values(own), np.stack(wanted[2 * number : 2 * number + 2]))


def test_frames_are_decoded_with_some_more_pixels_than_the_model_sees() -> None:
    sampling = processor().with_options({"videos_kwargs": {"size": {"longest_edge": 1 << 20}}}).sampling
    assert (sampling.most, sampling.least, sampling.per_second, sampling.total_pixels) == (768, 4, 2.0, 4 << 20)


def test_a_frame_may_have_a_bound_of_its_own() -> None:
    """As `Qwen3VLVideoProcessor.resize` computes it, if cap_pixels_per_frame is set."""
    capped = processor({"video_processor": {"cap_pixels_per_frame": True, "max_video_tokens": 6, **HALF}})
    frames = [picture(300, 200)] * 4
    own = runs(capped.video(frames, [0.0] * 4))[0].input
    assert own.length == 6
    assert runs(processor().video(frames, [0.0] * 4))[0].input.length == 54
    assert [each.tokens_of("video", (4, 300, 200, 3)) for each in (capped, processor())] == [2 * 6, 2 * 54]


def test_the_largest_image_fits_into_a_message() -> None:
    own = only_run(processor().image(np.zeros((4096, 4097, 3), np.uint8))).input
    assert processor().tokens_of("image", (4096, 4097, 3)) == own.length
    assert own.length == 4096 * 4096 // 1024
    assert media_input_to_pb(own).ByteSize() < MAX_MESSAGE_BYTES


def test_an_option_holds_for_the_kinds_that_have_it() -> None:
    made = processor().with_options({"size": {"longest_edge": 5000}, "min_pixels": 10, "max_frames": 9, "fps": 1})
    assert (made.image_bounds.least, made.image_bounds.most) == (10, 5000)
    assert (made.video_bounds.least, made.video_bounds.most) == (1 << 12, 5000)
    assert (made.frames.most, made.frames.per_second) == (9, 1)
    nested = {"images_kwargs": {"max_pixels": 6000}, "videos_kwargs": {"num_frames": 3}}
    again = made.with_options({**nested, "max_pixels": 7000})
    assert (again.image_bounds.most, again.video_bounds.most) == (6000, 5000)
    assert (again.frames.most, again.frames.per_second) == (3, None)
    assert processor().with_options({}) != made
    # An option of the server is no bound for a request's.
    assert made.with_options({"max_pixels": 1 << 24}).image_bounds.most == 1 << 24


def test_an_option_that_is_none_is_as_if_it_were_left_out() -> None:
    names = ("min_pixels", "max_pixels", "size", "fps", "min_frames", "max_frames", "num_frames", "images_kwargs")
    own = processor()
    assert own.with_options(dict.fromkeys(names)) == own.with_options({})
    assert own.with_options({"fps": 3, "num_frames": None, "do_sample_frames": True}).frames.per_second == 3
    assert own.with_options({"fps": 3, "videos_kwargs": {"fps": None}}).frames.per_second == 3
    assert own.with_options({"fps": None, "num_frames": 3}).frames.most == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_soft_tokens": 70}, "no option 'max_soft_tokens'; it has min_pixels, max_pixels, size, fps"),
        ({"max_pixels": (1 << 24) + 1}, "integers from 1 to 16777216"),
        ({"min_pixels": 0}, "integers from 1"),
        ({"min_pixels": True}, "integers from 1"),
        ({"size": 5}, "size must be an object with shortest_edge and longest_edge"),
        ({"size": {"height": 5}}, "size: this model has no option 'height'"),
        ({"videos_kwargs": {"max_pixels": 5}}, "videos_kwargs: this model has no option 'max_pixels'"),
        ({"videos_kwargs": {"fps": 1, "num_frames": 2}}, "exclude each other"),
        ({"fps": 0}, "above 0 and at most 1000"),
        ({"fps": float("nan")}, "above 0"),
        ({"fps": float("inf")}, "above 0"),
        ({"num_frames": 769}, "integers from 1 to 768"),
        ({"do_sample_frames": False}, "do_sample_frames must be true"),
        ({"videos_kwargs": {"do_sample_frames": 1}}, "do_sample_frames must be true"),
        ({"min_frames": 1.5}, "integers from 1 to 768"),
        ({"images_kwargs": []}, "images_kwargs must be an object"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        processor().with_options(options)
    assert "mm_processor_kwargs" in str(caught.value)


def test_the_models_settings_count() -> None:
    files = {"min_pixels": 100, "max_pixels": 4000, "video_processor": {"fps": 4, "max_frames": 10, **HALF}, **HALF}
    made = processor(files, patch_size=14, spatial_merge_size=2)
    assert (made.side, made.image_bounds) == (28, PixelBounds(100, 4000, 4000))
    assert (made.frames.per_second, made.frames.most, made.frame_limit) == (4, 10, 10)
    nested = processor({"image_processor": {"size": {"shortest_edge": 7, "longest_edge": 9}, **HALF}})
    assert nested.image_bounds == PixelBounds(7, 9, 9)
    assert nested.video_bounds == PixelBounds(1 << 12, 24 << 20, 24 << 20)
    with pytest.raises(ModelError, match=r"must be 0\.5"):
        processor({"image_mean": [0.48, 0.45, 0.4]})
