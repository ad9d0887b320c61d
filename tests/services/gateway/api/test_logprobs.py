from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import Logprob, Token
from paceline.services.gateway.api.logprobs import LogprobFormat, TextOffsets
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.planning.answers.pieces import PLACES
from tests.services.gateway.toy_model import VOCAB_SIZE

A, B, C = 97, 98, 99
UNUSED = (VOCAB_SIZE - 2, VOCAB_SIZE - 1)
"""Ids without a token, whose text is empty."""
REPORT = Token(B, (Logprob(B, -2.0, 2), Logprob(A, -0.5, 1), Logprob(B, -2.0, 2), Logprob(C, -3.0, 3)))


def test_chat_shows_the_chosen_token_and_the_most_likely_ones(toy_tokenizer: Tokenizer) -> None:
    entry = LogprobFormat(toy_tokenizer.vocabulary, 2, as_ids=False).chat([REPORT])["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("b", -2.0, [B])
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("a", -0.5), ("b", -2.0)]


def test_bytes_tell_apart_what_text_cannot(toy_tokenizer: Tokenizer) -> None:
    half = Token(0xC3, (Logprob(0xC3, -1.0, 1),))
    entry = LogprobFormat(toy_tokenizer.vocabulary, 0, as_ids=False).chat([half])["content"][0]
    assert (entry["token"], entry["bytes"], entry["top_logprobs"]) == ("�", [0xC3], [])


def test_completions_show_the_chosen_token_among_the_most_likely(toy_tokenizer: Tokenizer) -> None:
    fields = LogprobFormat(toy_tokenizer.vocabulary, 1, as_ids=False).completion([None, REPORT], [A, B], [4, 5])
    assert fields == {
        "text_offset": [4, 5],
        "token_logprobs": [None, -2.0],
        "tokens": ["a", "b"],
        "top_logprobs": [None, {"a": -0.5, "b": -2.0}],
    }
    assert next(iter(fields["top_logprobs"][1])) == "b", "the chosen token comes first"


def test_tokens_may_be_named_by_id(toy_tokenizer: Tokenizer) -> None:
    fields = LogprobFormat(toy_tokenizer.vocabulary, 1, as_ids=True).completion([REPORT], [B], [0])
    assert fields["tokens"] == ["token_id:98"]
    assert set(fields["top_logprobs"][0]) == {"token_id:97", "token_id:98"}


def test_prompt_logprobs_are_by_token_id(toy_tokenizer: Tokenizer) -> None:
    first, second = LogprobFormat(toy_tokenizer.vocabulary, 1, as_ids=False).prompt([None, REPORT])
    assert first is None
    assert second == {
        "98": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
    }


def test_an_excluded_token_has_a_number_that_json_knows(toy_tokenizer: Tokenizer) -> None:
    token = Token(A, (Logprob(A, -math.inf, 9),))
    assert LogprobFormat(toy_tokenizer.vocabulary, 0, as_ids=False).chat([token])["content"][0]["logprob"] == -9999.0


def test_tokens_that_the_request_names_are_shown_in_their_order(toy_tokenizer: Tokenizer) -> None:
    named = Token(B, (Logprob(B, -2.0, 2), Logprob(C, -3.0, 3), Logprob(B, -2.0, 2), Logprob(A, -0.5, 1)))
    shown = LogprobFormat(toy_tokenizer.vocabulary, 0, as_ids=False, shows_all=True)
    assert [top["token"] for top in shown.chat([named])["content"][0]["top_logprobs"]] == ["b", "c", "a"]
    assert shown.completion([named], [B], [0])["top_logprobs"] == [{"b": -2.0, "c": -3.0, "a": -0.5}]


def test_alternatives_keep_keys_of_their_own(toy_tokenizer: Tokenizer) -> None:
    ids = [0xE2, 0x82, 0xC3, A, *UNUSED]
    report = Token(0xE2, tuple(Logprob(own, -float(rank), rank) for rank, own in enumerate(ids, 1)))
    fields = LogprobFormat(toy_tokenizer.vocabulary, 6, as_ids=False).completion([report], [0xE2], [0])
    assert fields["tokens"] == ["bytes:\\xe2"]
    names = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xc3", "a", "", f"token_id:{UNUSED[1]}"]
    assert fields["top_logprobs"] == [dict(zip(names, (-1.0, -2.0, -3.0, -4.0, -5.0, -6.0)))]


@given(st.binary(max_size=24) | st.text(max_size=8).map(str.encode), PLACES)
def test_offsets_count_the_characters_of_the_text(data: bytes, places: list[int]) -> None:
    ends = sorted({place % len(data) for place in places} if data else {0})
    starts = sorted({0, *ends})
    counter = TextOffsets()
    offsets = [counter.push(data[start:end]) for start, end in zip(starts, [*starts[1:], len(data)])]
    characters = [number for number, size in enumerate(_sizes(data)) for _ in range(size)]
    assert offsets == [characters[start] if data else 0 for start in starts]
    assert counter.push(b"") <= len(data.decode(errors="replace"))


def _sizes(data: bytes) -> list[int]:
    """Return the number of bytes of each character of a text, whose broken bytes are U+FFFD."""
    sizes: list[int] = []
    while rest := data[sum(sizes) :]:
        try:
            sizes.append(len(rest.decode()[0].encode()))
        except UnicodeDecodeError as error:
            sizes.append(error.end if error.start == 0 else len(rest[: error.start].decode()[0].encode()))
    return sizes


def test_the_first_characters_of_the_tokens_may_be_no_text() -> None:
    counter = TextOffsets(-4)
    assert [counter.push(data) for data in (b"<s>", b" Hi", b" you")] == [0, 0, 2]
