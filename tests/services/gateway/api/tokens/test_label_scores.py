"""The route /generative_scoring, with toy workers.

Their logprob of a token that a request names is minus its id times the number of prompt tokens, over 10,000.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.services.gateway.planning.scoring import probability
from tests.services.gateway.api.scoring.test_causal_scores import margin, text
from tests.services.gateway.conftest import Stack, StartStack


async def test_labels_after_each_item(start_stack: StartStack) -> None:
    stack = await start_stack()
    body: dict[str, Any] = {"query": "is it ", "items": ["a", "bcd"], "label_token_ids": [ord("y"), ord("n")]}

    async def asked(**fields: Any) -> list[dict[str, float]]:
        answer = await stack.post("/generative_scoring", model="toy", **{**body, **fields})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (told["object"], told["id"][:6], told["usage"]["completion_tokens"]) == ("generative_score", "score-", 0)
        return [result["token_probs"] for result in sorted(told["results"], key=lambda result: result["index"])]

    def texts() -> list[str]:
        return sorted(map(text, stack.workers["prefill-0"].calls[-2:]), key=len)

    probs = await asked()
    assert texts() == ["is it a", "is it bcd"]
    lengths = [call.work.prompt_tokens for call in stack.workers["prefill-0"].calls[-2:]]
    for prob, length in zip(probs, sorted(lengths), strict=True):
        assert prob[str(ord("y"))] == pytest.approx(probability(margin(length)))
        assert sum(prob.values()) == pytest.approx(1)
    raw = await asked(apply_softmax=False, add_special_tokens=False)
    assert raw[0][str(ord("y"))] == pytest.approx(math.exp(-ord("y") * len("is it a") / 10_000))
    await asked(item_first=True)
    assert texts() == ["ais it ", "bcdis it "]
    await asked(query=[ord("q")], items=[[ord("a")], [ord("b"), ord("c")]])
    assert texts() == ["qa", "qbc"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/generative_scoring", {"query": "q", "items": [], "label_token_ids": [1]}, "items"),
    ("/generative_scoring", {"query": "q", "items": ["a"], "label_token_ids": []}, "label_token_ids"),
    ("/generative_scoring", {"query": "q", "items": ["a"], "label_token_ids": [10**6]}, "label_token_ids"),
    ("/generative_scoring", {"query": [10**6], "items": ["a"], "label_token_ids": [1]}, "query"),
]


async def test_refusals(stack: Stack) -> None:
    for path, body, param in REFUSED:
        answer = await stack.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.workers["prefill-0"].calls == []
