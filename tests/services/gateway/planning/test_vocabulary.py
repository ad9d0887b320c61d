from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from paceline.core.errors import ModelError
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.planning.vocabulary import Vocabulary


def sentencepiece() -> tokenizers.Tokenizer:
    """Return a tokenizer with a token <0x..> for every byte, and then a few words."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁hello", "▁", "wörld", "✓"]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_byte_level_tokens_are_their_bytes(toy_tokenizer: Tokenizer) -> None:
    assert [toy_tokenizer.vocabulary.token_bytes(byte) for byte in range(256)] == [bytes([b]) for b in range(256)]


def test_a_special_token_is_its_text(toy_tokenizer: Tokenizer) -> None:
    assert toy_tokenizer.vocabulary.token_text(256) == "<|end|>"
    assert toy_tokenizer.vocabulary.special_ids == {256, 257, 258}


def test_an_added_token_outside_the_byte_alphabet_is_itself(toy_tokenizer: Tokenizer) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|two words é|>"])
    assert Vocabulary(tokenizer).token_text(1) == "<|two words é|>" == tokenizer.decode([1], skip_special_tokens=False)


def test_an_id_of_the_padding_has_no_bytes(toy_tokenizer: Tokenizer) -> None:
    assert toy_tokenizer.vocabulary.token_bytes(299) == b""


def test_part_of_a_character_alone_shows_as_a_replacement(toy_tokenizer: Tokenizer) -> None:
    assert toy_tokenizer.vocabulary.token_text("é".encode()[0]) == "�"


@given(st.text(max_size=20), st.lists(st.sampled_from([256, 257, 258, 259]), max_size=5))
def test_byte_fallback_tokens_join_to_what_the_tokenizer_decodes(text: str, words: list[int]) -> None:
    tokenizer = sentencepiece()
    ids = [*words, *text.encode(), *words]
    vocabulary = Vocabulary(tokenizer)
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == tokenizer.decode(ids)


def test_metaspace_is_a_space() -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"▁a": 0}, []))
    tokenizer.decoder = decoders.Metaspace()
    assert Vocabulary(tokenizer).token_text(0) == " a"


def test_a_decoder_that_does_not_work_on_bytes_is_refused() -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Vocabulary(tokenizer)
