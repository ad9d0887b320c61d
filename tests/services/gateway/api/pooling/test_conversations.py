"""Conversations as inputs: each is the text of the model's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_pooling import PROMPTS, write_toy_encoder

TEMPLATE = "{% for message in messages %}[{{ message.role[0] }}]{{ message.content }}{% endfor %}"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture
async def talker(start_stack: StartStack, tmp_path: Path) -> Stack:
    folder = write_toy_encoder(tmp_path / "toy", template=TEMPLATE, prompts=PROMPTS)
    return await start_stack(prefill=0, decode=0, pool=1, model=str(folder))


def texts_of(stack: Stack) -> list[str]:
    work = stack.workers["pool-0"].calls[-1].work
    return [bytes(token for token in one.token_ids if token < 256).decode() for one in work.pool.inputs]


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_a_conversation_is_an_input(talker: Stack, path: str) -> None:
    answer = await talker.post(path, messages=said("a", "b"))
    assert (answer.status_code, texts_of(talker)) == (200, ["[u]a[a]b"])
    assert answer.json()["usage"]["prompt_tokens"] == len("[u]a[a]b")
    answer = await talker.post(path, messages=[said("a"), said("b", "c")])
    assert (len(answer.json()["data"]), texts_of(talker)) == (2, ["[u]a", "[u]b[a]c"])


async def test_labels_of_conversations(start_stack: StartStack, tmp_path: Path) -> None:
    folder = write_toy_encoder(tmp_path / "toy", "BertForSequenceClassification", labels=2, template=TEMPLATE)
    stack = await start_stack(prefill=0, decode=0, pool=1, model=str(folder))
    answer = await stack.post("/classify", messages=said("aa"))
    assert (answer.status_code, texts_of(stack)) == (200, ["[u]aa"])
    assert len(answer.json()["data"]) == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
    ({}, "input"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 100}]}, "messages"),
]


async def test_refusals(talker: Stack, embedder: Stack) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        for body, param in REFUSED:
            answer = await talker.post(path, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    answer = await embedder.post("/pooling", messages=said("a"))
    assert "no chat template" in answer.json()["error"]["message"]
    assert not talker.workers["pool-0"].calls


async def test_images_in_the_form_of_cohere_are_for_models_that_read_them(talker: Stack) -> None:
    for body, place in (
        ({"images": [IMAGE["image_url"]["url"]]}, "images"),  # type: ignore[index]
        ({"inputs": [{"content": [{"type": "text", "text": "a"}, IMAGE]}]}, "inputs"),
    ):
        answer = await talker.post("/v2/embed", **body)
        assert answer.status_code == 400, answer.text
        assert place in answer.json()["error"]["message"]
    answer = await talker.post("/v2/embed", texts=["a"], images=["data:,"])
    assert answer.json()["error"]["message"] == "send one of texts, inputs and images"
    # Without an image, the parts are a text with the model's prompt.
    parts = [{"type": "text", "text": text} for text in "ab"]
    assert (await talker.post("/v2/embed", inputs=[{"content": parts}], input_type="search_query")).status_code == 200
    assert texts_of(talker) == ["q: a\nb"]
