"""A key pays for the tokens that are computed, and what is refused costs nothing and computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.conftest import Stack, StartStack

KEYS = """
[eve]
key = "key-of-eve"
tokens_per_minute = 1000
"""


@pytest.fixture
async def limited(start_stack: StartStack, encoder: Path, tmp_path: Path) -> Stack:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(KEYS)
    return await start_stack(prefill=0, decode=0, pool=1, model=str(encoder), api_keys_file=str(file))


async def ask(stack: Stack, path: str, **body: Any) -> httpx.Response:
    return await stack.http.post(path, json=body, headers={"authorization": "Bearer key-of-eve"})


async def test_tokens_of_inputs_count_towards_the_limit_of_a_key(limited: Stack) -> None:
    texts = ["a" * 50] * 10
    assert (await ask(limited, "/v1/embeddings", input=texts)).status_code == 200
    refused = await ask(limited, "/embed", inputs=texts)
    assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
    assert "retry-after" in refused.headers
    assert len(limited.workers["pool-0"].calls) == 1


async def test_a_query_is_charged_with_its_documents_before_anything_is_computed(limited: Stack) -> None:
    answer = await ask(limited, "/rerank", query="a", documents=["b" * 50] * 20)  # more than the limit of a minute
    assert 400 <= answer.status_code < 500
    assert not limited.workers["pool-0"].calls


async def test_a_document_that_is_too_long_is_refused_before_the_query_is_computed(embedder: Stack) -> None:
    answer = await embedder.post("/rerank", query="a", documents=["b", "c" * 100])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents[1]")
    assert not embedder.workers["pool-0"].calls
