from __future__ import annotations

import math

from paceline.core.types import Logprob, Token
from paceline.services.gateway.logprobs import LogprobFormat
from paceline.services.gateway.tokenizer import Tokenizer

A, B, C = 97, 98, 99
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
    fields, end = LogprobFormat(toy_tokenizer.vocabulary, 1, as_ids=False).completion([None, REPORT], [A, B], 4)
    assert fields == {
        "text_offset": [4, 5],
        "token_logprobs": [None, -2.0],
        "tokens": ["a", "b"],
        "top_logprobs": [None, {"a": -0.5, "b": -2.0}],
    }
    assert next(iter(fields["top_logprobs"][1])) == "b", "the chosen token comes first"
    assert end == 6


def test_tokens_may_be_named_by_id(toy_tokenizer: Tokenizer) -> None:
    fields, _ = LogprobFormat(toy_tokenizer.vocabulary, 1, as_ids=True).completion([REPORT], [B], 0)
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
    assert shown.completion([named], [B], 0)[0]["top_logprobs"] == [{"b": -2.0, "c": -3.0, "a": -0.5}]
