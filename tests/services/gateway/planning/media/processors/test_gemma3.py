"""Gemma 3's preprocessing against transformers' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3 import processing_gemma3
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.planning.chat_prompt import encode_prompt
from paceline.services.gateway.planning.media.items import Expansion, TokenRun
from paceline.services.gateway.planning.media.processors.gemma3 import Gemma3Processor, read_gemma3
from paceline.services.gateway.planning.tokenizer import Tokenizer

CONFIG = {"vision_config": {"image_size": 64}, "mm_tokens_per_image": 16}
BOI, EOI, IMAGE = 255999, 256000, 262144
CROPS = {"pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}


def processor(**settings: object) -> Gemma3Processor:
    made = read_gemma3(CONFIG, settings)
    assert made is not None
    return made


def runs(expansion: Expansion) -> list[TokenRun]:
    return [piece for piece in expansion.pieces if isinstance(piece, TokenRun)]


def reference(pixels: np.ndarray, **options: object) -> list[np.ndarray]:
    """Return the pixels [height, width, 3] of an image and its crops."""
    plain = {
        "size": {"height": 64, "width": 64},
        "do_rescale": False,
        "do_normalize": False,
        "return_tensors": "np",
        "input_data_format": "channels_last",
    }
    made = Gemma3ImageProcessorPil()(pixels, **plain, **options)
    return [np.moveaxis(np.asarray(each), 0, -1) for each in made["pixel_values"]]


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("size", [(64, 64), (30, 200), (500, 401), (7, 9)])
def test_an_image_has_the_pixels_that_transformers_gives_it(size: tuple[int, int]) -> None:
    pixels = picture(*size)
    expansion = processor().image(pixels)
    (run,) = runs(expansion)
    assert (run.input.shape, run.input.dtype, run.input.length) == ((64, 64, 3), "uint8", 16)
    assert run.input.data == reference(pixels)[0].tobytes()
    assert expansion.pieces == ("\n\n", BOI, run, EOI, "\n\n")


@settings(max_examples=40)
@given(st.tuples(st.integers(1, 1200), st.integers(1, 1200)))
@example((300, 1000))
@example((1400, 300))
@example((600, 2000))
@example((1, 3000))
def test_crops_are_those_of_transformers(size: tuple[int, int]) -> None:
    pixels = picture(*size)
    wanted = reference(pixels, do_pan_and_scan=True, **CROPS)
    expansion = processor().with_options({"do_pan_and_scan": True}).image(pixels)
    assert [run.input.data for run in runs(expansion)] == [each.tobytes() for each in wanted]
    shown = "".join(piece if isinstance(piece, str) else "#" for piece in expansion.pieces)
    one = "\n\n###\n\n"
    crops = " ".join([one] * (len(wanted) - 1))
    told = f"Here is the original image {one} and here are some crops to help you see better {crops}"
    assert shown == (told if crops else one)


SPECIAL = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in which line breaks merge, so that those around an image join their neighbours."""
    alphabet = sorted(set("Here is the original image and some crops to help you see better▁user:\n"))
    merged = [*alphabet, "\n\n", "\n\n\n", "\n\n\n\n"]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
    bpe = models.BPE({text: number for number, text in enumerate(merged)}, merges)
    inner = tokenizers.Tokenizer(bpe)
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    inner.add_special_tokens([*SPECIAL.values()])
    path = tmp_path_factory.mktemp("gemma3")
    inner.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("text", ["user:\n<start_of_image>see", "<start_of_image>\n<start_of_image>\nuser"])
@pytest.mark.parametrize("pan_and_scan", [False, True])
def test_a_prompt_has_the_tokens_that_transformers_gives_it(folder: Path, text: str, pan_and_scan: bool) -> None:
    inner = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=SPECIAL)
    made = processing_gemma3.Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 64, "width": 64}), inner, image_seq_length=16
    )
    images = [picture(300, 700), picture(40, 40)][: text.count("<start_of_image>")]
    wanted = made(text=text, images=images, do_pan_and_scan=pan_and_scan)["input_ids"]
    begin, image, end = (inner.convert_tokens_to_ids(token) for token in SPECIAL.values())
    ids = {"boi_token_index": begin, "image_token_index": image, "eoi_token_index": end}
    own = read_gemma3({**CONFIG, **ids}, {})
    assert own is not None
    own = own.with_options({"do_pan_and_scan": pan_and_scan})
    tokenizer = Tokenizer(folder, media_tokens=own.tokens)
    texts, pieces = text.split("<start_of_image>"), []
    for before, pixels in zip(texts, images, strict=False):
        pieces += [before, *own.image(pixels).pieces]
    prompt = encode_prompt([*pieces, texts[-1]], tokenizer, False, "messages")
    assert [prompt.token_ids] == np.asarray(wanted).tolist()


def test_settings_of_the_model_count() -> None:
    made = processor(size={"height": 32, "width": 48}, do_pan_and_scan=None, resample=3)
    assert runs(made.image(picture(64, 64)))[0].input.shape == (32, 48, 3)
    assert not made.pan_and_scan


@pytest.mark.parametrize("options", [{"do_pan_and_scan": 1}, {"images_kwargs": 5}, {"max_soft_tokens": 70}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
        processor().with_options(options)


def test_a_model_without_a_vision_config_takes_text_alone() -> None:
    assert read_gemma3({}, {}) is None
