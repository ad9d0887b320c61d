"""The routes /score and /rerank for a model that generates, whose toy workers find short prompts better.

Their logprob of a token that a request names is minus its id times the number of prompt tokens, over 10,000.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.types import Logprob, Token
from paceline.services.gateway.planning import planning
from paceline.services.gateway.planning.scoring import Scoring, probability
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_calls import Call
from tests.services.gateway.toy_model import write_toy_model

TOKENS = {"score_tokens": "y, n"}


def margin(prompt_tokens: int) -> float:
    return (ord("n") - ord("y")) * prompt_tokens / 10_000


def text(call: Call) -> str:
    """Return the text of a prompt that was computed, without special tokens."""
    return bytes(id for id in call.work.token_ids if id < 256).decode()


async def test_scores_of_pairs(start_stack: StartStack) -> None:
    stack = await start_stack(**TOKENS)
    for path, body, pairs in (
        ("/score", {"text_1": "q", "text_2": ["a", "bcd"]}, ["qa", "qbcd"]),
        ("/v1/score", {"queries": ["q", "r"], "documents": [{"text": "a"}, "b"]}, ["qa", "rb"]),
        ("/score", {"queries": "q", "items": "a"}, ["qa"]),
    ):
        answer = (await stack.post(path, model="toy", **body)).json()
        assert (answer["object"], answer["id"][:6], answer["model"]) == ("list", "score-", "toy")
        calls = stack.workers["prefill-0"].calls[-len(pairs) :]
        calls.sort(key=lambda call: call.work.key.request_id)
        texts = [prompt.split("<Query>: ")[1] for prompt in map(text, calls)]
        assert texts == [f"{pair[0]}\n<Document>: {pair[1:]}" for pair in pairs]
        scores = [probability(margin(call.work.prompt_tokens)) for call in calls]
        assert answer["data"] == [
            {"index": index, "object": "score", "score": pytest.approx(score)} for index, score in enumerate(scores)
        ]
        usage = answer["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] == sum(call.work.prompt_tokens for call in calls)
        assert usage["completion_tokens"] == 0
    assert all(not call.commands for call in stack.workers["decode-0"].calls)  # a first token is enough


async def test_reranking_returns_the_best_documents_first(start_stack: StartStack) -> None:
    stack = await start_stack(**TOKENS)
    body = {"query": "q", "documents": ["aaa", {"text": "b"}, "cc"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = (await stack.post(path, **body, top_n=2, instruction="be kind")).json()
        assert (answer["id"][:7], answer["model"]) == ("rerank-", "toy")
        found = [(result["index"], result["document"]["text"]) for result in answer["results"]]
        assert found == [(1, "b"), (2, "cc")]
        better, worse = (result["relevance_score"] for result in answer["results"])
        assert 0 < worse < better < 1
    assert all("<Instruct>: be kind\n" in text(call) for call in stack.workers["prefill-0"].calls)
    bare = (await stack.post("/rerank", **body, return_documents=False, use_activation=False)).json()
    longest = max(call.work.prompt_tokens for call in stack.workers["prefill-0"].calls[-3:])
    assert bare["results"][2] == {"index": 0, "relevance_score": pytest.approx(margin(longest))}


async def test_a_score_template_has_a_query_and_a_document(start_stack: StartStack, tmp_path: Path) -> None:
    template = (
        "{% for role in ['system', 'query', 'document'] %}{% for message in messages if message.role == role %}"
        "{{ role[0] }}={{ message.content }};{% endfor %}{% endfor %}"
    )
    (tmp_path / "score.jinja").write_text(template)
    model = write_toy_model(tmp_path / "toy", chat_template=template)
    for options in ({"score_template": str(tmp_path / "score.jinja")}, {"model": str(model)}):
        stack = await start_stack(**TOKENS, **options)
        assert (await stack.post("/score", text_1="one", text_2="two")).status_code == 200
        assert (await stack.post("/score", text_1="one", text_2="two", instruction="i")).status_code == 200
        assert [*map(text, stack.workers["prefill-0"].calls)] == ["q=one;d=two;", "s=i;q=one;d=two;"]


async def test_long_texts_are_cut(start_stack: StartStack) -> None:
    stack = await start_stack(**TOKENS)
    body: dict[str, Any] = {"query": "query", "documents": ["0123456789", "ab"]}

    async def asked(path: str = "/rerank", **fields: Any) -> list[tuple[str, str]]:
        answer = await stack.post(path, **{**body, **fields})
        assert answer.status_code == 200, answer.text
        texts = sorted(map(text, stack.workers["prefill-0"].calls[-2:]), key=len, reverse=True)
        pairs = [each.split("<Query>: ")[1].split("\n<Document>: ") for each in texts]
        return [(query, document) for query, document in pairs]

    assert await asked(max_tokens_per_doc=4) == [("query", "0123"), ("query", "ab")]
    assert await asked(max_tokens_per_doc=0, max_tokens_per_query=2) == [("qu", "0123456789"), ("qu", "ab")]
    full = stack.workers["prefill-0"].calls[-1].work.prompt_tokens
    longest = max(call.work.prompt_tokens for call in stack.workers["prefill-0"].calls[-2:])
    assert await asked(max_tokens_per_query=2, truncate_prompt_tokens=longest - 3) == [("qu", "0123456"), ("qu", "ab")]
    assert max(call.work.prompt_tokens for call in stack.workers["prefill-0"].calls[-2:]) == longest - 3
    assert full <= longest
    (long, _) = await asked(documents=["x" * 2000, "ab"], truncate_prompt_tokens=-1)
    assert 0 < len(long[1]) < 2000
    pairs = {"query": None, "text_1": "q", "text_2": ["0123456789", "ab"], "documents": None}
    assert await asked("/score", **pairs, max_tokens_per_doc=3) == [("q", "012"), ("q", "ab")]


async def test_a_query_is_cut_once_for_all_documents(start_stack: StartStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = await start_stack(**TOKENS)
    cut, read = Scoring.cut, []
    monkeypatch.setattr(Scoring, "cut", lambda self, text, limit: read.append(text) or cut(self, text, limit))
    body = {"query": "query " * 1000, "documents": ["a", "b", "c"], "max_tokens_per_query": 2}
    assert (await stack.post("/rerank", **body)).status_code == 200
    assert sorted(map(len, read)) == [1, 1, 1, 6000]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/score", {"text_1": "q"}, "text_1"),
    ("/score", {"text_1": "q", "documents": ["a"]}, "text_1"),
    ("/score", {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/score", {"queries": "q", "documents": ["a", 5]}, "documents[1]"),
    ("/score", {"text_1": "q", "text_2": ["a", "b" * 600]}, "text_2[1]"),
    ("/rerank", {"query": "q", "documents": []}, "documents"),
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "q", "documents": ["a"], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ("/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": -5}, "max_tokens_per_doc"),
    ("/rerank", {"query": "q", "documents": ["a"], "max_chunks_per_doc": 5}, "max_chunks_per_doc"),
]


async def test_refusals(start_stack: StartStack) -> None:
    stack = await start_stack(**TOKENS)
    for path, body, param in REFUSED:
        answer = await stack.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.workers["prefill-0"].calls == []


async def test_a_model_without_the_words_yes_and_no_cannot_score(stack: Stack) -> None:
    answer = await stack.post("/score", text_1="q", text_2="a")
    assert answer.status_code == 400
    assert "--score-tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("tokens", ["y", "y,n,m", "y,y", "yes,no"])
def test_tokens_that_are_no_two_tokens_are_refused_at_the_start(toy_tokenizer: Tokenizer, tokens: str) -> None:
    with pytest.raises(ConfigError, match="--score-tokens"):
        Scoring(toy_tokenizer, tokens, "")


def test_a_template_that_cannot_be_read_is_refused_at_the_start(toy_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="score template"):
        Scoring(toy_tokenizer, "y,n", str(tmp_path / "none"))


def test_a_score_is_the_softmax_of_two_tokens(toy_tokenizer: Tokenizer) -> None:
    scoring = Scoring(toy_tokenizer, "y,n", "")
    yes, no = scoring.token_ids
    token = Token(7, (Logprob(7, -0.1, 1), Logprob(no, math.log(0.01), 3), Logprob(yes, math.log(0.03), 2)))
    assert probability(scoring.margin(token)) == pytest.approx(0.75)
    assert (probability(-1e9), probability(1e9)) == (pytest.approx(0.0), 1.0)


async def test_pairs_have_a_limit_together(start_stack: StartStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = await start_stack(**TOKENS)
    monkeypatch.setattr(planning, "_MOST_SCORED_TOKENS", 600)
    assert (await stack.post("/score", text_1="q", text_2=["a"])).status_code == 200
    answer = await stack.post("/score", text_1="q", text_2=["a"] * 50)
    assert (answer.status_code, "have more than 600 tokens" in answer.text) == (400, True)
