"""Prompts of texts and media."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from paceline.core.errors import ModelError
from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.services.gateway.planning.chat_prompt import encode_prompt, media_tokens
from paceline.services.gateway.planning.media.items import MediaTokens, Piece, TokenRun
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.toy_model import (
    ASSISTANT,
    BOI,
    EOI,
    IMAGE,
    MEDIA_TOKENS,
    USER,
    write_toy_media_model,
    write_toy_model,
)


def image(length: int) -> MediaInput:
    return MediaInput(MediaKind.IMAGE, length, "uint8", (length, 1, 3), bytes(3 * length))


def test_each_input_gets_a_span_with_its_placeholders(media_tokenizer: Tokenizer) -> None:
    first, second = image(3), image(2)
    pieces = ["a", "b", BOI, TokenRun.of(IMAGE, first), EOI, "<|user|>", TokenRun.of(IMAGE, second)]
    prompt = encode_prompt(pieces, media_tokenizer, False, "messages")
    assert prompt.token_ids == [97, 98, BOI, IMAGE, IMAGE, IMAGE, EOI, USER, IMAGE, IMAGE]
    assert prompt.media == (
        MediaSpan(3, 3, first.digest, MediaKind.IMAGE),
        MediaSpan(8, 2, second.digest, MediaKind.IMAGE),
    )
    assert prompt.inputs == (first, second)
    assert media_tokens(prompt.media) == {"image_tokens": 5}


written = st.lists(
    st.sampled_from([*MEDIA_TOKENS, "<|user|>", "<|assistant|>", "<|ima", "ge|>", "<", "|>", "hé", " "]), max_size=8
).map("".join)


@given(written)
def test_a_text_never_becomes_a_token_of_media(media_tokenizer: Tokenizer, text: str) -> None:
    token_ids = media_tokenizer.encode(text, False)
    assert not media_tokenizer.reserved_ids.intersection(token_ids)
    assert media_tokenizer.decode(token_ids) == text


def test_other_special_tokens_stay_special(media_tokenizer: Tokenizer) -> None:
    assert media_tokenizer.encode("<|user|><|assistant|>", False) == [USER, ASSISTANT]


@pytest.fixture(scope="module")
def framing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that writes a token before each text and one after it."""
    folder = write_toy_media_model(tmp_path_factory.mktemp("models") / "framing")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <|end|>", special_tokens=[("<|user|>", USER), ("<|end|>", 256)]
    )
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, media_tokens=MediaTokens({"image": (IMAGE,)}, frozenset({IMAGE})))


def test_special_tokens_stand_around_the_whole_prompt(framing: Tokenizer) -> None:
    own = image(1)
    prompt = encode_prompt([TokenRun.of(IMAGE, own), "a"], framing, True, "messages")
    assert prompt.token_ids == [USER, IMAGE, 97, 256]
    assert prompt.media == (MediaSpan(1, 1, own.digest, MediaKind.IMAGE),)
    spelled = framing.encode("<|image|>", True)
    assert (spelled[0], spelled[-1], framing.decode(spelled[1:-1])) == (USER, 256, "<|image|>")
    assert framing.encode("a", True) == [USER, 97, 256]


def _metaspace(scheme: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "metaspace always": ("BPE", {"pre_tokenizer": _metaspace("always"), "decoder": decoders.Metaspace()}),
    "metaspace first": ("BPE", {"pre_tokenizer": _metaspace("first"), "decoder": decoders.Metaspace()}),
    "metaspace never": ("BPE", {"pre_tokenizer": _metaspace("never"), "decoder": decoders.Metaspace()}),
    "legacy": (
        "BPE",
        {
            "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
        },
    ),
    "bytes": ("BPE", {"pre_tokenizer": pre_tokenizers.ByteLevel(False), "decoder": decoders.ByteLevel()}),
    "bytes after a space": ("BPE", {"pre_tokenizer": pre_tokenizers.ByteLevel(True), "decoder": decoders.ByteLevel()}),
    "unigram": ("Unigram", {"pre_tokenizer": _metaspace("first"), "decoder": decoders.Metaspace()}),
    "word pieces": (
        "WordPiece",
        {
            "normalizer": normalizers.BertNormalizer(),
            "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
            "decoder": decoders.Fuse(),
        },
    ),
}


@pytest.fixture(params=[(name, strips) for name in FAMILIES for strips in (False, True)], ids=str)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, tokenizers.Tokenizer, int]:
    """A trained tokenizer of a family, as we read it and as the library does, and its token for images."""
    name, strips = request.param
    kind, parts = FAMILIES[name]
    folder = write_toy_model(tmp_path / "model")
    file = str(folder / "tokenizer.json")
    own = tokenizers.Tokenizer(models.Unigram() if kind == "Unigram" else getattr(models, kind)(unk_token="<unk>"))
    for part, value in parts.items():
        setattr(own, part, value)
    trainer: Any = trainers.UnigramTrainer(unk_token="<unk>") if kind == "Unigram" else own.model.get_trainer()
    trainer.vocab_size, trainer.show_progress = 90, False
    trainer.special_tokens = [tokenizers.AddedToken(text, special=True) for text in ("<unk>", "<s>", "<image>")]
    own.train_from_iterator(["What is this a picture of two dogs USER ASSISTANT <image> (image)?.:\n"] * 5, trainer)
    own.add_special_tokens([tokenizers.AddedToken("<image>", lstrip=strips, rstrip=strips, special=True)])
    own.save(file)
    image_token = own.token_to_id("<image>")
    ours = Tokenizer(folder, media_tokens=MediaTokens({"image": (image_token,)}, frozenset({image_token})))
    return ours, tokenizers.Tokenizer.from_file(file), image_token


def test_a_prompt_is_tokenized_as_one_text(family: tuple[Tokenizer, tokenizers.Tokenizer, int]) -> None:
    ours, reference, image_token = family
    for texts in (["a picture"], ["", " this"], ["USER: ", "\nWhat", "is", " of  dogs ", ""], ["", "", ""]):
        pieces: list[Piece] = [texts[0]]
        for text in texts[1:]:
            pieces += [TokenRun.of(image_token, image(3)), text]
        whole = reference.encode("<image><image><image>".join(texts), add_special_tokens=True).ids
        assert encode_prompt(pieces, ours, True, "messages").token_ids == whole, texts


def test_a_spelled_token_is_tokenized_as_the_text_that_it_is(
    family: tuple[Tokenizer, tokenizers.Tokenizer, int],
) -> None:
    ours, _, image_token = family
    spelled, similar = (ours.encode(f"a {text} of{text}dogs", True) for text in ("<image>", "(image)"))
    assert image_token not in spelled
    said, expected = ("".join(map(ours.token_string, ids)) for ids in (spelled, similar))
    assert said.replace("<", "(").replace(">", ")") == expected


def test_a_tokenizer_without_the_models_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_toy_media_model(tmp_path / "broken")
    with pytest.raises(ModelError, match="the token 5000, which tokenizer"):
        Tokenizer(folder, media_tokens=MediaTokens({}, frozenset({5000})))
