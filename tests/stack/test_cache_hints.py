"""An agent keeps its context in the cache while other requests flood it, in every API."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from bench.cache.agent_loop import FORMS, agent_loop, ratio
from tests.services.gateway.toy_model import AGENT_TEMPLATE, VOCAB_SIZE, write_toy_model
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

CALLS = 10
FLOOD_TOKENS = 9000
"""More tokens than the arena has room for."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with a tiny model, whose arena has 512 blocks of 16 tokens."""
    folder = tmp_path_factory.mktemp("small")
    model = write_toy_model(folder / "model", chat_template=AGENT_TEMPLATE)
    write_tiny(model, "llama", vocab_size=VOCAB_SIZE, eos_token_id=256, max_position_embeddings=16_384)
    options = ("--kv-memory=4MiB", "--threads=1", "--served-model-name=m", "--max-model-len=8000")
    with serve(folder / "log", str(model), *options) as stack:
        yield stack


@pytest.mark.parametrize(
    "name", [name if name == "messages" else pytest.param(name, marks=pytest.mark.thorough) for name in FORMS]
)
async def test_an_agents_context_survives_a_flood(small: Stack, name: str) -> None:
    async with httpx.AsyncClient(base_url=small.url, timeout=60) as client:
        found = await agent_loop(client, FORMS[name], calls=CALLS, flood_tokens=FLOOD_TOKENS, result_words=25)
    assert ratio(found) <= 1.1, found
    (host,) = small.fleet()["hosts"]
    assert host["evicted_blocks"] > (CALLS - 1) * FLOOD_TOKENS // 16 - host["total"]
    await small.settled()
