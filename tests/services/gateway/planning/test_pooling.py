"""Texts, pairs and token ids as inputs of workers: special tokens, prompts, cuts and bundles."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.core.pooling_config import PoolingConfig
from paceline.core.pooling_folder import read_pooling_config
from paceline.services.gateway.http.errors import ContextLengthError
from paceline.services.gateway.planning import pooling
from paceline.services.gateway.planning.batch_encoding import longest_first
from paceline.services.gateway.planning.pool_bundle import PoolInput
from paceline.services.gateway.planning.pooling import (
    BUNDLE_TOKENS,
    PoolOptions,
    PoolPlan,
    TextInput,
    divide,
    effort,
    plan_pool,
)
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.pool.tiny_bert import MAX_TOKENS, token_ids, write_tiny_bert

CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PoolingConfig, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("bert")
    write_tiny_bert(folder)
    config = read_pooling_config(folder)
    assert config is not None
    return config, Tokenizer(folder, generates=False)


def planned(model: tuple[PoolingConfig, Tokenizer], *contents: Any, **options: Any) -> PoolPlan:
    config, tokenizer = model
    changes = {name: options.pop(name) for name in ("include_prompt", "lower_case") if name in options}
    inputs = [TextInput(content, f"input[{index}]") for index, content in enumerate(contents)]
    config = dataclasses.replace(config, **changes)
    return plan_pool(inputs, PoolOptions(**options), config, tokenizer, MAX_TOKENS, workers=1)


def ids(plan: PoolPlan) -> list[list[int]]:
    return [list(each) for each in plan.token_ids]


def test_texts_get_special_tokens_and_ids_do_not(model: tuple[PoolingConfig, Tokenizer]) -> None:
    plan = planned(model, "a b", [7, 8], " c ")
    assert ids(plan) == [token_ids("a b"), [7, 8], token_ids("c")]
    assert ids(planned(model, "a b", add_special_tokens=False)) == [token_ids("a b")[1:-1]]
    assert plan.cut_tokens == [0, 0, 0]


def test_the_second_text_of_a_pair_begins_after_the_separator(model: tuple[PoolingConfig, Tokenizer]) -> None:
    (prompt,) = planned(model, ("a b", "c")).plan.prompts
    assert prompt.pool is not None
    (own,) = prompt.pool.inputs
    assert (list(own.token_ids), own.second_start) == ([*token_ids("a b"), *token_ids("c")[1:]], 4)


def test_a_prompt_stands_before_texts_and_is_counted_only_if_the_model_leaves_it_out(
    model: tuple[PoolingConfig, Tokenizer],
) -> None:
    def prompt_tokens(**options: Any) -> list[int]:
        (prompt,) = planned(model, "c", [7, 8], prompt="a b ", **options).plan.prompts
        assert prompt.pool is not None
        assert [list(each.token_ids) for each in prompt.pool.inputs] == [token_ids("a b c"), [7, 8]]
        return [each.prompt_tokens for each in prompt.pool.inputs]

    assert prompt_tokens() == [0, 0]
    assert prompt_tokens(include_prompt=False) == [3, 0]  # with the special token before it


def test_a_model_in_lower_case_gets_such_texts(model: tuple[PoolingConfig, Tokenizer]) -> None:
    assert ids(planned(model, "A B", lower_case=True)) == [token_ids("a b")]


def test_what_is_too_long_is_refused_with_the_limit_or_cut_on_the_side_that_is_asked_for(
    model: tuple[PoolingConfig, Tokenizer],
) -> None:
    text = "a b c d e"
    with pytest.raises(ContextLengthError, match=r"input\[1\] has 66 tokens and this model takes 64 at once"):
        planned(model, "a", " ".join("a" * 64))
    end, start = (planned(model, text, truncate=side, max_tokens=5) for side in ("end", "start"))
    assert ids(end) == [token_ids("a b c")]
    assert ids(start) == [token_ids("c d e")]
    assert (end.cut_tokens, start.cut_tokens) == ([2], [2])
    assert ids(planned(model, [7, 8, 9], truncate="start", max_tokens=2)) == [[8, 9]]
    with pytest.raises(InvalidRequestError, match="2 tokens have no room"):
        planned(model, text, truncate="end", max_tokens=2)


def test_of_a_pair_the_longer_text_is_cut_first(model: tuple[PoolingConfig, Tokenizer]) -> None:
    plan = planned(model, ("a", "b c d e"), truncate="end", max_tokens=6)
    assert ids(plan) == [[CLS, 5, SEP, 6, 7, SEP]]
    assert [longest_first(*pair, 6) for pair in ((1, 9), (9, 1), (9, 9), (2, 3))] == [(1, 5), (5, 1), (3, 3), (2, 3)]


def test_queries_and_documents_have_markers_lengths_and_suffixes(model: tuple[PoolingConfig, Tokenizer]) -> None:
    changes = {"marker_ids": {"query": 4, "document": 1}, "lengths": {"query": 7}, "query_suffix": " z"}
    config, tokenizer = dataclasses.replace(model[0], **changes), model[1]  # type: ignore[arg-type]

    def tokens(text: str, **options: Any) -> list[int]:
        (found,) = ids(planned((config, tokenizer), text, **options))
        return found

    own = token_ids("a b")
    assert tokens("a b", role="query", prompt="c ") == [CLS, 4, *token_ids("c a b z")[1:]]
    assert tokens("a b") == tokens("a b", role="document") == [CLS, 1, *own[1:]]
    assert tokens("a b", add_special_tokens=False) == [1, *own[1:-1]]
    with pytest.raises(ContextLengthError, match=r"input\[0\] has 8 tokens and this model takes 7 at once"):
        tokens("a b c d", role="query")
    assert tokens("a b c d", role="query", truncate="end") == [CLS, 4, *token_ids("a b c d")[1:]]
    assert tokens("a b c d") == [CLS, 1, *token_ids("a b c d")[1:]]


def test_tables_of_vectors_get_no_special_tokens_and_perhaps_no_unknown_ones(
    model: tuple[PoolingConfig, Tokenizer],
) -> None:
    config, tokenizer = dataclasses.replace(model[0], special_tokens=False, dropped_ids=frozenset({1})), model[1]
    assert ids(planned((config, tokenizer), "a ? b")) == [token_ids("a b")[1:-1]]
    with pytest.raises(InvalidRequestError, match=r"input\[0\] has no word that the model knows"):
        planned((config, tokenizer), "?")


def test_an_input_with_an_image_is_a_bundle_of_its_own_and_is_never_cut(model: tuple[PoolingConfig, Tokenizer]) -> None:
    config, tokenizer = model
    own = MediaInput(MediaKind.IMAGE, 2, "uint8", (1, 2, 3), bytes(6))
    span = MediaSpan(1, 2, own.digest, own.kind)
    page = TextInput([7, 8, 8, 9], "messages", (span,), (own,))
    inputs = [TextInput("a", "input"), page, page, TextInput("b", "input"), TextInput("c", "input")]
    plan = plan_pool(inputs, PoolOptions(), config, tokenizer, MAX_TOKENS, workers=1).plan
    assert [(len(each.pool.inputs), each.media) for each in plan.prompts if each.pool is not None] == [
        (1, ()),
        (1, (span,)),
        (1, (span,)),
        (2, ()),
    ]
    assert plan.prompts[1].inputs == (own,)
    with pytest.raises(
        ContextLengthError, match="messages has 4 tokens with its media, and this model takes 3 at once"
    ):
        plan_pool([page], PoolOptions(truncate="end", max_tokens=3), config, tokenizer, MAX_TOKENS, workers=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"input\[1\] must not be empty"),
        ([], r"input\[1\] must not be empty"),
        ([5, 99], r"input\[1\]: token ids 99 are out of vocabulary"),
        ("\ud800", r"input\[1\]: the text is not valid Unicode"),
        (("a", "\ud800"), r"input\[1\]: the text is not valid Unicode"),
    ],
)
def test_bad_inputs_are_named(model: tuple[PoolingConfig, Tokenizer], content: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        planned(model, "a", content)


def test_embeddings_are_cut_only_as_the_model_allows(model: tuple[PoolingConfig, Tokenizer]) -> None:
    with pytest.raises(InvalidRequestError, match="dimensions must be 32"):
        planned(model, "a", dimensions=8)
    (prompt,) = planned(model, "a", dimensions=32).plan.prompts
    assert prompt.pool is not None
    assert prompt.pool.wish.dimensions == 32


def test_bundles_are_bounded_and_keep_the_order() -> None:
    inputs = [PoolInput([index] * 100) for index in range(300)]
    for workers in (1, 2, 4):
        bundles = list(divide(inputs, workers))
        assert [each for bundle in bundles for each in bundle] == inputs
        assert max(sum(len(each.token_ids) for each in bundle) for bundle in bundles) <= BUNDLE_TOKENS
        assert len(bundles) >= workers
    assert len(list(divide(inputs[:5], 4))) == 1
    assert [len(bundle) for bundle in divide([PoolInput([1] * 2 * BUNDLE_TOKENS)] * 2, 1)] == [1, 1]


def test_few_characters_are_tokenized_at_once(
    model: tuple[PoolingConfig, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tokenizer = model
    sizes: list[int] = []
    encode = tokenizer.encode_batch

    def counted(texts: Any, add_special_tokens: bool) -> Any:
        sizes.append(sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text, _ in texts))
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    contents = ["a " * 9, ("b", "c " * 20), [7, 8], "d " * 30, *["e"] * 40]
    whole = planned(model, *contents, prompt="q ")
    assert len(sizes) == 1
    sizes.clear()
    monkeypatch.setattr(pooling, "GROUP_CHARACTERS", 50)
    assert planned(model, *contents, prompt="q ") == whole
    assert max(sizes) <= len("q " + "d " * 30)
    assert len(sizes) > 3


def test_many_inputs_and_pairs_are_an_effort() -> None:
    def made(*contents: Any, prompt: str = "") -> int:
        return effort([TextInput(each, "input") for each in contents], PoolOptions(prompt=prompt))

    assert made("a" * 100) < 200
    assert made(("a" * 500, "b" * 500)) >= 1000
    assert made([1] * 1000) >= 1000
    assert made(*["a"] * 100) >= 2000
    assert made(*["a"] * 10, prompt="q" * 100) >= 1000
