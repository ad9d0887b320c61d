from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from paceline.core.errors import ModelError
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.planning.vocabulary import Detokenizer, Vocabulary
from tests.services.gateway.toy_model import _byte_vocabulary

ALPHABET = {byte: character for character, byte in _byte_vocabulary().items()}


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


def vocabulary_of(pieces: list[bytes]) -> tuple[tokenizers.Tokenizer, list[int]]:
    """Return a byte-level tokenizer whose tokens are `pieces`, and the ids of the pieces."""
    spelled = ["".join(ALPHABET[byte] for byte in piece) for piece in pieces]
    ids = {token: i for i, token in enumerate(dict.fromkeys(spelled))}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [ids[token] for token in spelled]


@cache
def byte_vocabulary() -> Vocabulary:
    tokenizer, _ = vocabulary_of([bytes([byte]) for byte in range(256)])
    tokenizer.add_special_tokens(["<|end|>"])
    return Vocabulary(tokenizer)


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stop_reason is not None:
            return pieces
    return [*pieces, detokenizer.finish()]


def text_of(data: bytes | list[int], **options: Any) -> tuple[str, str | int | None]:
    detokenizer = Detokenizer(byte_vocabulary(), **options)
    return "".join(pieces_of(detokenizer, list(data))), detokenizer.stop_reason


def reference(text: str, stops: list[str], include: bool, free: int = 0) -> str:
    """Return the text up to the first stop string that ends after the first `free` characters."""
    for end in range(free + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[:end] if include else text[: end - max(map(len, ending))]
    return text


@given(st.lists(st.binary(min_size=1, max_size=4), max_size=30))
def test_pieces_join_to_the_whole_decode(pieces: list[bytes]) -> None:
    tokenizer, ids = vocabulary_of(pieces or [b"a"])
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    assert "".join(pieces_of(detokenizer, ids)) == tokenizer.decode(ids)


@given(st.text(max_size=30), st.data())
def test_no_piece_holds_half_a_character(text: str, data: st.DataObject) -> None:
    encoded = text.replace("�", "").encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(encoded) - 1)), max_size=20)))
    pieces = [encoded[start:end] for start, end in zip([0, *cuts], [*cuts, len(encoded)])]
    tokenizer, ids = vocabulary_of([piece for piece in pieces if piece] or [b"a"])
    assert not any("�" in piece for piece in pieces_of(Detokenizer(Vocabulary(tokenizer)), ids))


@given(
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_end_the_text_however_it_is_cut(parts: list[str], stops: list[str], include: bool) -> None:
    expected = reference("".join(parts), stops, include)
    for tokens in ([part.encode() for part in parts], [bytes([b]) for b in "".join(parts).encode()]):
        tokenizer, ids = vocabulary_of(tokens or [b"c"])
        detokenizer = Detokenizer(Vocabulary(tokenizer), stop=stops, include_stop=include)
        emitted = ""
        for piece in pieces_of(detokenizer, ids if tokens else []):
            emitted += piece
            assert expected.startswith(emitted), "what was sent cannot be taken back"
        assert emitted == expected


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    detokenizer = Detokenizer(byte_vocabulary(), stop=["END"])
    assert [detokenizer.push(byte) for byte in b"xExENx"] == ["x", "", "Ex", "", "", "ENx"]


def test_the_stop_string_is_named() -> None:
    assert text_of(b"one two", stop=["w", "two"]) == ("one t", "w")


def test_a_stop_token_ends_the_text_and_is_no_part_of_it() -> None:
    assert text_of([*b"abc", 256, *b"d"], stop_token_ids=frozenset({256})) == ("abc", 256)


def test_a_stop_token_is_shown_where_asked_for() -> None:
    assert text_of([*b"abc", 256], stop_token_ids=frozenset({256}), include_stop=True) == ("abc<|end|>", 256)


def test_a_stop_token_gives_free_what_was_held_back() -> None:
    assert text_of([*b"xE", 256], stop=["END"], stop_token_ids=frozenset({256})) == ("xE", 256)


def test_special_tokens_are_skipped_unless_wanted() -> None:
    assert text_of([*b"a", 256, *b"b"]) == ("ab", None)
    assert text_of([*b"a", 256, *b"b"], skip_special_tokens=False) == ("a<|end|>b", None)


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert text_of("é".encode()[:1]) == ("�", None)


@given(
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 20),
    st.booleans(),
)
def test_stop_strings_count_where_they_end_behind_min_tokens(
    parts: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    tokenizer, ids = vocabulary_of([part.encode() for part in parts] or [b"c"])
    options: dict[str, Any] = {"stop": stops, "include_stop": include, "min_tokens": min_tokens}
    pieces = pieces_of(Detokenizer(Vocabulary(tokenizer), **options), ids if parts else [])
    free = len("".join(parts[:min_tokens]))
    assert "".join(pieces) == reference("".join(parts), stops, include, free)


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "expected"),
    [
        (b"aXbXc", ["X"], 2, "aXb"),
        (b"aENDb", ["END"], 2, "a"),
        (b"aENDb", ["END"], 3, "a"),
        (b"aENDbEND", ["END"], 4, "aENDb"),
        (b"abc", ["b", "abx"], 2, "abc"),
    ],
)
def test_a_stop_string_across_the_edge_of_min_tokens(
    text: bytes, stop: list[str], min_tokens: int, expected: str
) -> None:
    assert text_of(text, stop=stop, min_tokens=min_tokens)[0] == expected
